"""Files of killed processes are removed by the next process; those of living ones and of others stay."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.run_directory import create, remove_abandoned

_OWNER = """
import sys
from pathlib import Path
from backends.run_directory import create
path = create(Path(sys.argv[1]))
(path / "state").write_bytes(b"shared memory")
print(path, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(base: Path):
    """Another process with a run directory in `base`; yields the process and the directory."""
    command = [sys.executable, "-c", _OWNER, str(base)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_only_the_files_of_a_dead_process_are_removed(tmp_path):
    own = create(tmp_path)
    for foreign in ("tandem-state-abc", "other-run-1", "psm_1234"):
        (tmp_path / foreign).mkdir()
    with owner(tmp_path) as (killed, left), owner(tmp_path) as (_, living):
        killed.kill()
        killed.wait()
        assert (left / "state").exists(), "a killed process removes nothing"
        assert remove_abandoned(tmp_path) == [left]
        assert not left.exists()
        assert (living / "state").exists() and own.exists()
    assert remove_abandoned(tmp_path) == [living]
    assert {path.name for path in tmp_path.iterdir()} == {
        own.name, "tandem-state-abc", "other-run-1", "psm_1234",
    }  # fmt: skip


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "tandem-run-link").symlink_to(target)
    assert remove_abandoned(tmp_path) == []
    assert (target / "lock").exists()


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_next_start_finds_nothing_after_an_orderly_exit(is_killed):
    end = "os.kill(os.getpid(), 9)" if is_killed else "sys.exit()"
    script = (
        f"import os, sys; from backends.run_directory import *; print(run_directory(), flush=True); {end}"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    path = Path(ended.stdout.strip())
    assert path.is_absolute() and path.exists() == is_killed
    if is_killed:
        assert path in remove_abandoned(path.parent)
