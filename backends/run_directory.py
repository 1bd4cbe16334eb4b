"""Directory for the shared memory and the sockets of this process.

A process that is killed removes no file. So all files with a name are in one directory per process, whose
lock file the process holds locked: the kernel releases the lock with the last descriptor, however the process
ended. The next process that creates its directory removes those without an owner. Process ids alone would not
do: they are reused, and containers that share /dev/shm do not see each other's processes.
"""

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_PREFIX = "tandem-run-"
_LOCK = "lock"


def _base() -> Path:
    """Shared memory where the system has it; unix sockets work there too."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@cache
def run_directory() -> Path:
    """The directory of this process, created at the first call and removed at its exit.

    The first call also removes the directories that killed processes of this user have left.
    """
    remove_abandoned(_base())
    path = create(_base())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def create(base: Path) -> Path:
    """Creates a directory in `base` that this process owns until its end."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # The descriptor stays open, and children do not inherit it.
        descriptor = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may have removed the directory before it was locked.
        if (path / _LOCK).exists():
            return path
        os.close(descriptor)


def remove_abandoned(base: Path) -> list[Path]:
    """Removes this user's run directories in `base` whose owner has ended; returns them."""
    removed = [path for path in base.glob(f"{_PREFIX}*") if _remove_if_abandoned(path)]
    if removed:
        log.info("removed what killed servers had left: %s", ", ".join(map(str, removed)))
    return removed


def _remove_if_abandoned(path: Path) -> bool:
    # OSError: another process removes the directory at this moment, or its owner creates it.
    with suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        finally:
            os.close(descriptor)
        return True
    return False
