import numpy as np
import pytest

from controlplane.core.pool_view import HiddenStateCost
from predictors.timing.hidden_state_cost import HiddenStateCostModel

MEASURED = HiddenStateCost(1e-5, 1e-5, 1e-3)


def _observed(cost, truth, *, steps=2_000, share=None, slowness=1.0):
    draw = np.random.default_rng(3)
    for _ in range(steps):
        requests = int(draw.integers(4, 100))
        hidden = int(requests * (draw.random() if share is None else share))
        tokens, hidden_tokens = (int(count * draw.integers(50, 300)) for count in (requests - hidden, hidden))
        took = slowness * (0.03 + 7.8e-7 * (tokens + hidden_tokens) + 8e-5 * requests)
        took += float(draw.normal(0, 5e-4))
        took += truth.token * hidden_tokens + truth.request * hidden + truth.step * (hidden > 0)
        cost.observe(
            tokens=tokens + hidden_tokens,
            requests=requests,
            hidden_tokens=hidden_tokens,
            hidden_requests=hidden,
            seconds=took,
        )
    return cost.price


@pytest.mark.parametrize(
    "truth",
    [HiddenStateCost(0.0), HiddenStateCost(2e-5), HiddenStateCost(0.0, 5e-5, 3e-3)],
    ids=["nothing", "restoring", "absorbing"],
)
def test_steps_correct_a_wrong_measurement(truth):
    found = _observed(HiddenStateCostModel(MEASURED), truth)
    # Cost in a step with 50 requests of 200 tokens.
    added, true = (price.step + 50 * (price.request + 200 * price.token) for price in (found, truth))
    assert added == pytest.approx(true, abs=6e-4)
    assert found.step == pytest.approx(truth.step, abs=6e-4)


def test_measurement_is_kept_without_hidden_state_requests():
    found = _observed(HiddenStateCostModel(MEASURED), HiddenStateCost(0.0), share=0.0)
    for name in ("token", "request", "step"):
        assert getattr(found, name) == pytest.approx(getattr(MEASURED, name), rel=1e-3)


def test_negative_cost_is_clipped_to_zero():
    found = _observed(HiddenStateCostModel(MEASURED), HiddenStateCost(-5e-7))
    assert found.token == 0.0
    assert min(found.request, found.step) >= 0.0


def test_stall_has_little_effect():
    cost = HiddenStateCostModel(MEASURED)
    before = _observed(cost, HiddenStateCost(0.0, 5e-5, 3e-3))
    cost.observe(tokens=10_000, requests=50, hidden_tokens=10_000, hidden_requests=50, seconds=5.0)
    moved = [
        abs(getattr(cost.price, name) - getattr(before, name)) * many
        for name, many in (("token", 10_000), ("request", 50), ("step", 1))
    ]
    assert sum(moved) < 1e-3


def test_lasting_change_is_learned():
    cost = HiddenStateCostModel(MEASURED)
    _observed(cost, HiddenStateCost(0.0, 0.0, 3e-3))
    found = _observed(cost, HiddenStateCost(0.0, 0.0, 3e-2))
    assert found.step == pytest.approx(3e-2, rel=0.3)


def test_few_steps_after_a_long_pause_change_little():
    """The variance of an unobserved cost stays bounded, while the other costs are still tracked."""
    truth = HiddenStateCost(0.0, 5e-5, 3e-3)
    cost = HiddenStateCostModel(MEASURED)
    learned = _observed(cost, truth)
    _observed(cost, truth, steps=20_000, share=0.0)
    stood = _observed(cost, truth, steps=3_000, share=0.0, slowness=1.5)
    found = _observed(cost, truth, steps=20, slowness=1.5)
    for price in (stood, found):
        for name, of in (("token", 10_000), ("request", 50), ("step", 1)):
            assert of * abs(getattr(price, name) - getattr(learned, name)) < 1e-3, name
