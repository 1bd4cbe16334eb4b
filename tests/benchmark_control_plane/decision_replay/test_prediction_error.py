"""The parts of the error of a prediction, near 0 and 100 % too."""

from math import hypot

import pytest

from benchmark_control_plane.decision_replay.prediction_error import (
    ErrorParts,
    draw_error,
    paired_error,
    sampling_error,
    wilson_error,
)
from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.decision_replay.self_check import LEAST_JUDGED, CheckedFigure, SelfCheck, checked

MET, LATE = RequestResult("met", 10.0), RequestResult("late", 90.0)
CHAT, OTHER = ("chat", "generate"), ("other", "embed")


def test_a_share_of_a_sample_has_the_interval_of_wilson():
    # From the tables of Newcombe (1998): 81 of 263 are 25.5 to 36.6 %, 0 of 20 up to 16.1 %.
    assert wilson_error(81 / 263, 263) == pytest.approx(0.366 - 81 / 263, abs=0.001)
    assert wilson_error(0.0, 20) == pytest.approx(wilson_error(1.0, 20))
    assert wilson_error(0.0, 20) == pytest.approx(0.161, abs=0.001)
    assert wilson_error(0.0, 100) == pytest.approx(0.037, abs=0.001)
    assert wilson_error(0.0, 0) == 1.0


def test_differences_of_which_none_was_seen_are_not_certain():
    assert paired_error([0] * 100) == pytest.approx(hypot(0.037, 0.037), abs=0.001)
    assert paired_error([1] * 10 + [-1] * 10 + [0] * 80) > paired_error([0] * 100)
    assert sampling_error([0] * 100) == paired_error([0] * 100)
    assert sampling_error([1, 0, -1]) == paired_error([1, 0, -1])


def test_changes_that_come_together_say_less_than_as_many_apart():
    apart = [1 if at % 20 == 0 else 0 for at in range(1_000)]
    together = [1 if at < 50 else 0 for at in range(1_000)]
    assert sampling_error(together) > 2 * sampling_error(apart)


def test_another_draw_counts_by_its_net_change_or_by_its_changes():
    assert draw_error([]) == draw_error([0, 0]) == 0.0
    assert draw_error([1, -1] * 50) == pytest.approx(1.96 / 2**0.5 * 10 / 100)
    assert draw_error([1] * 50 + [0] * 50) == pytest.approx(1.96 / 2**0.5 * 50 / 100)


def test_parts_are_independent_and_together_at_most_everything():
    assert ErrorParts(0.03, 0.04, 0.0, 0.0).total == pytest.approx(0.05)
    assert ErrorParts(0.9, 0.9, 0.1, 0.0).total == 1.0


def test_the_self_check_says_how_far_off_the_attainment_of_each_class_may_be():
    few = LEAST_JUDGED - 1
    measured = [MET] * 100 + [MET] * few
    replayed = [LATE] * 10 + [MET] * 90 + [MET] * few
    groups = {CHAT: range(100), OTHER: range(100, 100 + few)}
    check = checked(groups, measured, replayed, lambda: replayed)
    assert check.attainment_error(CHAT) == pytest.approx(hypot(0.1, paired_error([-1] * 10 + [0] * 90)))
    # Not judged, since they are few; the fewer, the less is known.
    assert check.not_judged == [OTHER]
    assert check.attainment_error(OTHER) == pytest.approx(hypot(0, paired_error([0] * few)))
    assert check.attainment_error(("none", "embed")) == 1.0


def test_times_are_as_far_off_as_the_worst_judged_latency_and_at_least_a_slower_device():
    share = CheckedFigure(CHAT, "attainment", 0.5, 0.9, 0.5)
    assert SelfCheck([share], [], []).time_error == pytest.approx(0.05)
    near = CheckedFigure(CHAT, "p50_ms", 100.0, 98.0, 15.0)
    assert SelfCheck([share, near], [], []).time_error == pytest.approx(0.05)
    far = CheckedFigure(OTHER, "p90_ms", 50.0, 44.0, 7.5)
    assert SelfCheck([near, far], [], []).time_error == pytest.approx(0.12)
