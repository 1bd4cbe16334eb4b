"""Attainment and burn rate over sliding windows."""

import pytest

from controlplane.core.clock import Instant, seconds
from controlplane.core.decision import Outcome
from controlplane.service.attainment_windows import WINDOWS, Attained, AttainmentWindows


def at(value: float) -> Instant:
    return Instant(seconds(value))


def test_a_rejection_is_a_miss_and_an_abort_does_not_count():
    windows = AttainmentWindows()
    for outcome in Outcome:
        windows.count("quick", outcome, at(0))
    assert windows.within(WINDOWS["5m"], at(1)) == {"quick": Attained(1, 5)}


def test_a_window_forgets_what_is_older():
    windows = AttainmentWindows()
    for second in range(7_200):
        windows.count("quick", Outcome.LATE if second < 5_000 else Outcome.MET, at(second))
    now = at(7_200)
    assert windows.within(WINDOWS["5m"], now)["quick"] == Attained(300, 300)
    assert windows.within(WINDOWS["1h"], now)["quick"] == Attained(2_200, 3_600)
    # Nobody counts at the window's begin.
    assert windows.within(WINDOWS["5m"], at(7_600))["quick"] == Attained()


def test_burn_is_the_share_of_misses_over_the_allowed_share():
    assert Attained(90, 100).to_json() == {"met": 90, "ended": 100, "burn": 1.0}
    assert Attained(0, 4).to_json()["burn"] == 10.0
    assert Attained().to_json()["burn"] is None


def test_the_counts_are_bounded_and_reach_back_an_hour():
    windows = AttainmentWindows()
    for second in range(0, 7_200, 2):
        windows.count("gold", Outcome.MET, at(second))
        windows.count("gold", Outcome.ABORTED, at(second))
    assert len(windows._samples) == 721
    assert windows.now()["gold"].ended == 3_600
    assert windows.at(at(7_000))["gold"].ended == pytest.approx(3_500, abs=3)
    assert windows.at(at(0))["gold"].ended == pytest.approx(1_440, abs=3)
    assert AttainmentWindows().at(at(0)) == {}


def test_requests_before_an_idle_time_are_not_part_of_a_later_window():
    windows = AttainmentWindows()
    for tenth in range(40):
        windows.count("gold", Outcome.MET, at(tenth / 10))
    assert windows.at(at(6_600)) == windows.now()
    windows.count("gold", Outcome.MET, at(7_200))
    assert windows.at(at(6_600))["gold"].ended == 40
    # A window that begins within the five seconds of a sample has all requests of the sample.
    assert windows.at(at(7_204))["gold"].ended == 40
    assert windows.at(at(7_206))["gold"].ended == 41
