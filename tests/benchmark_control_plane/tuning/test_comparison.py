"""The acceptance rule: a paired gain beyond chance, worth its keys, at the expense of no class."""

from dataclasses import replace

import pytest

from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.tuning.comparison import (
    ClassDifference,
    Comparison,
    compare,
    difference,
    points,
)
from tests.benchmark_control_plane.tuning.synthetic_blocks import REQUESTS, WEIGHTS, block


def results(*, interactive: int, batch: int):
    """So many of the first requests of each class are met."""
    left, found = {"interactive": interactive, "batch": batch}, []
    for row in block().traffic.rows:
        left[row["class"]] -= 1
        found.append(RequestResult("met" if left[row["class"]] >= 0 else "rejected", None))
    return found


def test_attainment_is_weighted_by_class():
    assert points(block(), results(interactive=40, batch=20), WEIGHTS) == 100
    assert points(block(), results(interactive=20, batch=20), WEIGHTS) == pytest.approx(100 * 120 / 220)


def test_requests_that_the_log_aborted_are_not_judged():
    judged = block()
    judged.traffic.rows[0]["outcome"] = "aborted"
    assert sum(map(len, judged.groups.values())) == REQUESTS - 1


def test_the_interval_of_paired_differences_is_students():
    found = difference([1.0, 3.0, 2.0, 2.0])
    # t of 3 degrees of freedom at 97.5 %: 3.182; standard deviation 0.8165.
    assert (found.mean, found.error) == (2.0, pytest.approx(3.182 * 0.8165 / 2, rel=1e-3))
    assert difference([5.0]).low == float("-inf")


def comparison(gains, *, lost=0.0, requests=1_000, changed=1):
    classes = [ClassDifference("batch", requests, 0.9, 0.9 - lost / 100, 0.0, 0.0)]
    return Comparison(50.0, gains, classes, changed)


@pytest.mark.parametrize(
    ("found", "is_better"),
    [
        (comparison([2.0, 3.0, 2.5]), True),
        (comparison([-2.0, 3.0, 2.5]), False),
        (comparison([2.0, 3.0, 2.5], lost=1.1), False),
        (comparison([2.0, 3.0, 2.5], lost=1.0), True),
        (comparison([2.0, 3.0, 2.5], lost=2.0, requests=50), True),
        (comparison([0.25, 0.3, 0.25], changed=3), False),
        (comparison([0.25, 0.3, 0.25], changed=2), True),
        # The model of the machine may be wrong by more than the gain.
        (replace(comparison([2.0, 3.0, 2.5]), self_check=2.6), False),
        (replace(comparison([2.0, 3.0, 2.5]), device=2.6), False),
        (replace(comparison([2.0, 3.0, 2.5]), self_check=1.0, device=1.0), True),
    ],
)
def test_a_gain_counts_beyond_chance_and_costs(found, is_better):
    assert found.is_better == is_better


def test_the_searched_value_counts_keys_and_losing_classes():
    assert comparison([2.0, 2.0], changed=3).value == pytest.approx(1.7)
    assert comparison([2.0, 2.0], changed=3, lost=4.0).value == pytest.approx(1.7 - 3)


def test_outcomes_are_counted_by_class():
    before, after = results(interactive=20, batch=20), results(interactive=30, batch=10)
    found = compare([block()] * 2, [before] * 2, [after] * 2, WEIGHTS, changed=1)
    batch, interactive = found.classes
    assert (interactive.before, interactive.after, interactive.requests) == (0.5, 0.75, 80)
    assert (batch.lost, batch.rejected_after) == (pytest.approx(50.0), 0.5)
    assert found.losers == [batch]
