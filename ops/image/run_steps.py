"""Runs the steps of a Dockerfile in a root folder by chroot, for machines without a container builder.

    debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-venv bookworm ROOT
    python ops/image/run_steps.py ops/image/cpu.Dockerfile ROOT
    python ops/image/run_steps.py ops/image/cpu.Dockerfile ROOT --serve configs/dev.yaml

ROOT stands for the base image. All stages share it, so `COPY --from` copies nothing. RUN, ENV, WORKDIR, USER
and `COPY . .` are carried out, the last one with the files that the .dockerignore beside the Dockerfile
leaves; ENTRYPOINT, CMD, EXPOSE and HEALTHCHECK are printed. `--serve` starts what ENTRYPOINT and CMD state,
as the image's user and with this configuration, until HEALTHCHECK succeeds, then stops it. As in compose and
in the chart its root is read-only but for the user's home and an empty /tmp. Needs root. Variables that begin
with PIP_ are passed on.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CONTEXT = Path(__file__).resolve().parents[2]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PRINTED = ("FROM", "ARG", "SHELL", "EXPOSE", "ENTRYPOINT", "CMD", "HEALTHCHECK")
_START_SECONDS, _STOP_SECONDS, _PERIOD_SECONDS = 600.0, 60.0, 2.0
# Bound to those of this machine inside a mount namespace that ends with the process.
_MOUNTS = ("proc", "dev", "sys")
# Then `$home` and /tmp are all that can be written. A remount concerns only the mount itself.
_READ_ONLY = (
    'mount --rbind "$0" "$0"',
    'if [ -d "$0$home" ]; then mount --bind "$0$home" "$0$home"; fi',
    'mount -t tmpfs -o mode=1777 tmpfs "$0/tmp"',
    'mount -o remount,bind,ro "$0"',
)


class Step(NamedTuple):
    """One instruction, and the folder, user and environment that it meets."""

    name: str
    rest: str
    folder: str
    user: str
    environment: Mapping[str, str]

    def words(self) -> list[str]:
        """The JSON array that ends the arguments."""
        found: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return found


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments; continued lines are joined, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def steps(dockerfile: Path) -> Iterator[Step]:
    """The instructions of a file. Raises ValueError for one that this script does not know."""
    folder, user = "/", "0"
    environment = {"PATH": _PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for name, rest in instructions(dockerfile.read_text(encoding="utf-8")):
        is_copy = name == "COPY" and (rest == ". ." or rest.startswith("--from="))
        if name == "ENV":
            for key, value in re.findall(r"(\w+)=(\S+)", rest):
                environment[key] = value.replace("$PATH", environment["PATH"])
        elif name == "WORKDIR":
            folder = rest
        elif name == "USER":
            user = rest
        elif name != "RUN" and name not in _PRINTED and not is_copy:
            raise ValueError(f"{dockerfile}: {name} {rest}: not supported; add it to this script")
        yield Step(name, rest, folder, user, dict(environment))


def copied_folders(ignore: Path) -> Sequence[str]:
    """The top-level names that an ignore file lets through: it begins with `*`, then lists `!name`."""
    lines = ignore.read_text(encoding="utf-8").split()
    if lines[0] != "*":
        raise ValueError(f"{ignore}: the first line should be *, then !NAME for each name to copy")
    return [line[1:] for line in lines if line.startswith("!")]


def run_steps(dockerfile: Path, root: Path) -> None:
    """Carries out the file in `root`. Raises CalledProcessError if a step fails."""
    for step in steps(dockerfile):
        sys.stdout.write(f"--- {step.name} {step.rest}\n")
        sys.stdout.flush()
        if step.name == "WORKDIR":
            (root / step.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.name == "RUN":
            subprocess.run(
                inside(root, step, ["/bin/bash", "-c", step.rest]), env=step.environment, check=True
            )
        elif (step.name, step.rest) == ("COPY", ". ."):
            for path in copied_folders(dockerfile.with_name(f"{dockerfile.name}.dockerignore")):
                _copy(CONTEXT / path, root / step.folder.lstrip("/") / path)


def serve(dockerfile: Path, root: Path, config: Path) -> float:
    """Seconds until the image's server is healthy. Raises RuntimeError if it is not, or fails to stop."""
    last = {step.name: step for step in steps(dockerfile)}
    command, check = last["CMD"].words(), last["HEALTHCHECK"]
    target = root / next(word for word in command if word.endswith(".yaml")).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, target)
    began = time.monotonic()
    words = inside(root, check, [*last["ENTRYPOINT"].words(), *command], is_read_only=True)
    server = subprocess.Popen(words, env=check.environment)
    try:
        while subprocess.run(
            inside(root, check, check.words(), is_read_only=True), env=check.environment, check=False
        ).returncode:
            if server.poll() is not None or time.monotonic() - began > _START_SECONDS:
                raise RuntimeError(f"the server is not healthy after {time.monotonic() - began:.0f} s")
            time.sleep(_PERIOD_SECONDS)
        took = time.monotonic() - began
    finally:
        server.terminate()
        status = server.wait(_STOP_SECONDS)
    if status != 0:
        raise RuntimeError(f"the server ended with status {status}")
    return took


def inside(root: Path, step: Step, words: Sequence[str], *, is_read_only: bool = False) -> list[str]:
    """The command line that runs `words` in `root` as a step's user, in its folder.

    With `is_read_only` only the home of the step's environment and an empty /tmp can be written.
    """
    mounts = [f'mount --rbind /{name} "$0/{name}"' for name in _MOUNTS]
    if is_read_only:
        first, *others = _READ_ONLY
        mounts = [f"home={shlex.quote(step.environment['HOME'])}", first, *mounts, *others]
    inner = (
        f"{' && '.join(mounts)} && "
        'exec chroot --userspec="$1" "$0" /bin/sh -c \'cd "$0" && exec "$@"\' "$2" "${@:3}"'
    )
    return ["unshare", "--mount", "/bin/bash", "-c", inner, str(root), step.user, step.folder, *words]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(
            source, target, ignore=shutil.ignore_patterns("__pycache__", "results"), dirs_exist_ok=True
        )
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--serve", type=Path, metavar="CONFIG")
    options = parser.parse_args()
    if options.serve is None:
        run_steps(options.dockerfile, options.root)
    else:
        sys.stdout.write(f"healthy after {serve(options.dockerfile, options.root, options.serve):.1f} s\n")
