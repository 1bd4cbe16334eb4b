"""Tests of adaptive conformal calibration: coverage holds for any forecasts."""

import numpy as np
import pytest

from predictors.output_length.conformal import Conformal
from predictors.output_length.quantile_model import LEVELS, UPPER

WRONG = np.linspace(3.0, 4.0, len(LEVELS))


def covered(conformal, answers):
    below = np.zeros(len(LEVELS))
    for log_tokens in answers:
        said = conformal.adjusted(WRONG)
        assert (np.diff(said) >= 0).all()
        below += log_tokens <= said
        conformal.observe(said, log_tokens, 20.0)
    return below / len(answers)


def test_wrong_forecasts_reach_nominal_coverage():
    rng = np.random.default_rng(0)
    conformal = Conformal()
    covered(conformal, rng.normal(6.0, 1.0, 1_000))
    assert covered(conformal, rng.normal(6.0, 1.0, 1_000)) == pytest.approx(np.array(LEVELS), abs=0.03)


def test_shift_sets_is_out_until_coverage_recovers():
    rng = np.random.default_rng(1)
    conformal = Conformal()
    covered(conformal, rng.normal(4.0, 0.5, 1_000))
    said = []
    for log_tokens in rng.normal(6.0, 0.5, 500):
        conformal.observe(conformal.adjusted(WRONG), log_tokens, 20.0)
        said.append(conformal.is_under_covered)
    assert any(said[:60])
    assert not any(said[-200:])
    assert covered(conformal, rng.normal(6.0, 0.5, 500))[UPPER] == pytest.approx(0.9, abs=0.02)


def test_outputs_truncated_at_the_limit_move_no_level_far_beyond_it():
    conformal = Conformal()
    for _ in range(500):
        conformal.observe(conformal.adjusted(WRONG), 3.5, 3.5)
    assert conformal.offsets.max() < 6.0


@pytest.mark.parametrize("limit", [4.0, 6.0, 8.0])
def test_truncated_outputs_leave_the_coverage_of_the_others(limit):
    """Every second request has a limit that cuts nearly all, half or few of the outputs."""
    rng = np.random.default_rng(2)
    conformal, below, count = Conformal(), np.zeros(len(LEVELS)), 0
    for number, log_tokens in enumerate(rng.normal(6.0, 1.0, 8_000)):
        said, top = conformal.adjusted(WRONG), limit if number % 2 else 20.0
        conformal.observe(said, min(log_tokens, top), top)
        if number >= 2_000 and not number % 2:
            below += log_tokens <= said
            count += 1
    assert below / count == pytest.approx(np.array(LEVELS), abs=0.04)


def test_forecasts_beyond_every_limit_recover():
    """All outputs end by themselves, far below forecasts that exceed the limit."""
    rng = np.random.default_rng(3)
    conformal = Conformal()
    for log_tokens in rng.normal(2.0, 0.3, 2_000):
        conformal.observe(conformal.adjusted(WRONG + 1.5), log_tokens, 4.4)
    said = conformal.adjusted(WRONG + 1.5)
    assert said[UPPER] == pytest.approx(2.0 + 0.3 * 1.28, abs=0.3)
