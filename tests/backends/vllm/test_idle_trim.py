"""When an engine's heap is trimmed, by its processor time once a second."""

import pytest

from backends.vllm.idle_trim import IdleTrim


@pytest.mark.parametrize(
    ("readings", "trims"),
    [
        # Nothing has been done since the start.
        ([10.0, 10.0, 10.01], []),
        # It works, and is then idle.
        ([10.9, 11.8, 11.81, 11.82], [11.81]),
        # It is never idle.
        ([10.9, 11.8, 12.7, 13.6], []),
        # Little work, then more.
        ([10.5, 10.5, 11.2, 11.2, 11.2, 12.0, 12.3, 12.3], [11.2, 12.3]),
    ],
    ids=["at rest", "after work", "busy", "twice"],
)
def test_it_is_trimmed_once_it_is_idle_after_work(readings: list[float], trims: list[float]):
    found: list[float] = []
    now = 10.0
    idle = IdleTrim(lambda: found.append(now), now)
    for now in readings:
        idle.read(now)
    assert found == trims
