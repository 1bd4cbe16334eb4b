import numpy as np
import pytest

from predictors.hidden_cost import HiddenCost


def _observed(cost, *, per_hidden_token, steps=2_000, share=None):
    draw = np.random.default_rng(3)
    for _ in range(steps):
        tokens = int(draw.integers(1_000, 12_000))
        hidden = int(tokens * (draw.random() if share is None else share))
        requests = int(draw.integers(4, 100))
        took = 0.03 + 7.8e-7 * tokens + per_hidden_token * hidden + 8e-5 * requests
        noise = float(draw.normal(0, 5e-4))
        cost.observe(tokens=tokens, hidden_tokens=hidden, requests=requests, seconds=took + noise)
    return cost.seconds_per_token


@pytest.mark.parametrize("truth", [0.0, 2e-6, 2e-5])
def test_steps_correct_a_wrong_measurement(truth):
    assert _observed(HiddenCost(1e-5), per_hidden_token=truth) == pytest.approx(truth, abs=3e-7)


def test_the_measurement_stands_while_nobody_keeps_hidden_states():
    assert _observed(HiddenCost(1e-5), per_hidden_token=0.0, share=0.0) == pytest.approx(1e-5, rel=1e-3)


def test_what_saves_time_costs_nothing():
    assert _observed(HiddenCost(1e-5), per_hidden_token=-5e-7) == 0.0
