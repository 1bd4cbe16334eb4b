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
