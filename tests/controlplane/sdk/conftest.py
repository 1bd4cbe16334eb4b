import sys

import pytest

from controlplane import sdk  # noqa: F401


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which tests move."""
    now = [100.0]
    monkeypatch.setattr(sys.modules["controlplane.sdk.deadline"], "monotonic", lambda: now[0])
    return now
