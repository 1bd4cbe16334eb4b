"""Names of tenants in the decision log are hashes with a salt that stays with the log."""

import fcntl
import stat
from concurrent.futures import ThreadPoolExecutor, wait

from controlplane.config import parse
from controlplane.service.decision_log.decision_log import decision_log_of, read_salt
from controlplane.service.runtime.timers import MonotonicClock

MODELS = {"models": {"chat": {"model": "m"}}}


def salt_of(folder):
    log = decision_log_of(parse({**MODELS, "decision_log": {"dir": str(folder)}}), dict, {}, MonotonicClock())
    assert log is not None
    return read_salt(folder)


def test_the_salt_is_kept_and_only_its_owner_may_read_it(tmp_path):
    first = salt_of(tmp_path)
    assert len(first) == 16 and salt_of(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "tenant-salt").stat().st_mode) == 0o600


def test_an_empty_salt_is_replaced(tmp_path):
    (tmp_path / "tenant-salt").touch()
    assert len(salt_of(tmp_path)) == 16
    assert stat.S_IMODE((tmp_path / "tenant-salt").stat().st_mode) == 0o600


def test_servers_that_start_at_the_same_time_have_one_salt(tmp_path):
    """As the boxes of one machine: the second one finds the file before the first one has written to it."""
    with ThreadPoolExecutor() as threads:
        with (tmp_path / "tenant-salt").open("wb") as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            second = threads.submit(salt_of, tmp_path)
            wait([second], timeout=0.2)
            first.write(b"of the first one")
        assert second.result() == b"of the first one"
        assert salt_of(tmp_path) == b"of the first one"
