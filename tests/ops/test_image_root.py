"""What the image starts may write only where compose and the chart let it."""

import os
import subprocess
from pathlib import Path

import pytest

from ops.image.run_steps import Step, inside

SCRIPT = 'for path in /tmp/a "$HOME/a" /etc/a /a; do (: > "$path") 2> /dev/null && echo "$path"; done; true'


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(
    ("is_read_only", "writable"),
    [(True, ["/tmp/a", "/home/tandem/a"]), (False, ["/tmp/a", "/home/tandem/a", "/etc/a", "/a"])],
)
def test_a_read_only_root_leaves_home_and_tmp(tmp_path: Path, writable, *, is_read_only: bool):
    for name in ("usr", "proc", "dev", "sys", "tmp", "etc", "home/tandem"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        if (path := Path("/") / name).is_symlink():
            (tmp_path / name).symlink_to(path.readlink())
    step = Step("RUN", "", "/", "0", {"PATH": os.environ["PATH"], "HOME": "/home/tandem"})
    words = inside(tmp_path, step, ["/bin/sh", "-c", SCRIPT], is_read_only=is_read_only)
    # The root has the programs of this machine.
    bound = ["unshare", "--mount", "sh", "-c", 'mount --rbind /usr "$0/usr" && exec "$@"', str(tmp_path)]
    done = subprocess.run(
        [*bound, *words], env=dict(step.environment), capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip(f"mounts are not permitted here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, writable, "")
    assert (tmp_path / "home/tandem/a").exists() and (tmp_path / "tmp/a").exists() != is_read_only
