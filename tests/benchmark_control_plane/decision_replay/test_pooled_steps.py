"""Rows of the models of one half of a log become one machine, and lines resist outliers."""

import numpy as np
import pytest

from benchmark_control_plane.decision_replay.pooled_steps import pass_factor, pooled_costs, step_spread
from benchmark_control_plane.decision_replay.resistant_line import resistant_line


def model(step, observed, residuals=None):
    costs = {"step_s": step, "decode_s": 2 * step, "cell_s": 3 * step, "prompt_token_s": 4 * step}
    return {**costs, "observed": observed, "residuals": residuals}


def test_costs_are_means_over_the_steps_observed():
    # 100 steps before the first row, 300 before the second, and none before the third.
    rows = [model(1.0, 100), model(2.0, 400), model(9.0, 400)]
    assert pooled_costs(rows) == pytest.approx((1.75, 3.5, 5.25, 7.0))
    # After a restart of the engine.
    assert pooled_costs([model(1.0, 300), model(2.0, 100)])[0] == pytest.approx(1.25)
    assert pooled_costs([model(3.0, 0)])[0] == 3.0


def test_the_spread_has_the_quantiles_of_the_residuals_and_mean_one():
    assert step_spread([model(1.0, 1)]) == (1.0,)
    spread = step_spread([model(1.0, 1, [-0.2, 0.0, 0.2]), model(1.0, 2), model(1.0, 3, [-0.4, 0.0, 0.4])])
    assert spread == pytest.approx((*[0.7] * 3, *[1.0] * 4, *[1.3] * 3))
    skewed = step_spread([model(1.0, 1, [-0.1, 0.0, 1.1])])
    assert np.mean(skewed) == pytest.approx(1.0) and skewed[-1] / skewed[3] == pytest.approx(2.1)


def test_passes_take_the_median_of_the_rows_longer():
    rows = [{"residuals": found} for found in ([0.0, 0.2, 1.0], None, [0.0, 0.6, 1.0], [0.1, 0.4, 9.0])]
    assert pass_factor(rows) == pytest.approx(1.4)
    assert pass_factor([{"residuals": None}]) == 1.0


def test_a_fifth_of_outliers_does_not_move_the_line():
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 30, 1_000)
    y = 0.002 + 0.0004 * x + rng.normal(0, 0.001, 1_000)
    y[rng.random(1_000) < 0.2] += 0.5
    constant, slope = resistant_line(x, y)
    assert slope == pytest.approx(0.0004, abs=0.0001)
    assert constant == pytest.approx(0.002, abs=0.001)
    assert resistant_line([3, 3, 3], [1, 2, 9]) == (2.0, 0.0)
    assert resistant_line([], []) == (0.0, 0.0)
