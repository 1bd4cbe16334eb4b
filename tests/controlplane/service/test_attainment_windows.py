"""Attainment and burn rate over sliding windows."""

from controlplane.core.clock import Instant, seconds
from controlplane.core.decision import Outcome
from controlplane.service.attainment_windows import WINDOWS, Attained, AttainmentWindows


def at(value: float) -> Instant:
    return Instant(seconds(value))


def test_a_rejection_is_a_miss_and_an_abort_does_not_count():
    windows = AttainmentWindows()
    for outcome in Outcome:
        windows.count("quick", outcome)
    assert windows.within(WINDOWS["5m"], at(1)) == {"quick": Attained(1, 5)}


def test_a_window_forgets_what_is_older():
    windows = AttainmentWindows()
    for second in range(7_200):
        windows.advance(at(second))
        windows.count("quick", Outcome.LATE if second < 5_000 else Outcome.MET)
    now = at(7_200)
    assert windows.within(WINDOWS["5m"], now)["quick"] == Attained(300, 300)
    assert windows.within(WINDOWS["1h"], now)["quick"] == Attained(2_200, 3_600)


def test_burn_is_the_share_of_misses_over_the_allowed_share():
    assert Attained(90, 100).to_json() == {"met": 90, "ended": 100, "burn": 1.0}
    assert Attained(0, 4).to_json()["burn"] == 10.0
    assert Attained().to_json()["burn"] is None
