"""Names of tenants in the decision log are hashes with a salt that stays with the log."""

import stat

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
