"""The verdict of the comparison of predictions with real engines."""

import pytest

from benchmark_control_plane.experiments.gate.off_policy import Pair, summary

RIGHT = Pair("memory", "short queue", under_a=90, predicted=80, error=1, measured=82)
WRONG = Pair("memory", "no pacing", under_a=90, predicted=91, error=1, measured=86)
FAR = Pair("memory", "short queue", under_a=90, predicted=80, error=1, measured=84)
SMALL = Pair("memory", "no pacing", under_a=90, predicted=92, error=1, measured=93)
PASSED, FAILED = {"self_check": {"passed": True}}, {"self_check": {"passed": False}}


@pytest.mark.parametrize(
    ("pairs", "checks", "says"),
    [
        ([RIGHT], [PASSED], "holds"),
        ([RIGHT] * 9 + [WRONG, SMALL], [PASSED] * 2, "holds"),
        ([RIGHT] * 8 + [WRONG], [PASSED], "does not hold"),
        ([RIGHT], [PASSED, FAILED], "does not hold"),
        ([FAR], [PASSED], "does not hold"),
        ([SMALL], [PASSED], "nothing judged"),
        ([], [PASSED], "nothing judged"),
        ([], [], "nothing judged"),
        ([SMALL], [FAILED], "does not hold"),
    ],
)
def test_a_prediction_holds_only_if_signs_were_judged(pairs, checks, says):
    found = summary(pairs, {str(number): check for number, check in enumerate(checks)})
    assert found["verdict"].startswith(says)
    assert found["holds"] is (says == "holds")
    assert found["judged_signs"] == len(pairs) - pairs.count(SMALL)


def test_without_a_pair_there_is_no_mean_error():
    assert summary([], {"memory": PASSED})["mean_error_points"] is None
    assert summary([RIGHT, SMALL], {"memory": PASSED})["mean_error_points"] == 1.5
