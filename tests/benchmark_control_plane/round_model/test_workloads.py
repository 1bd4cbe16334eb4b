"""Drawn requests have the published distribution, and each fits the memory alone."""

import statistics

import numpy as np
import pytest

from benchmark_control_plane.common.distributions import Lognormal
from benchmark_control_plane.round_model.workloads import (
    CONVERSATION_OUTPUTS,
    CONVERSATION_PROMPTS,
    RoundRequest,
    mispredicted,
    model_one,
    model_two,
    typical_lengths,
)


@pytest.mark.parametrize("lengths", [CONVERSATION_PROMPTS, CONVERSATION_OUTPUTS])
def test_median_is_the_published_one_and_the_cap_holds(lengths: Lognormal) -> None:
    drawn = lengths.draw(np.random.default_rng(0), 20_000)
    assert statistics.median(drawn) == pytest.approx(lengths.median, rel=0.05)
    assert min(drawn) >= 1
    assert max(drawn) == lengths.cap
    assert statistics.median(lengths.quantiles(1_001)) == lengths.median


def test_mean_before_capping_is_the_published_one() -> None:
    uncapped = Lognormal(mean=85.32, median=45, cap=10**9)
    assert statistics.mean(uncapped.quantiles(20_000)) == pytest.approx(85.32, rel=0.03)


def test_typical_lengths_are_the_same_for_every_pairing() -> None:
    one, other = (typical_lengths(np.random.default_rng(seed), 100) for seed in (1, 2))
    assert one != other
    assert sorted(s for s, _ in one) == sorted(s for s, _ in other)
    assert sorted(o for _, o in one) == sorted(o for _, o in other)


@pytest.mark.parametrize("draw", [model_one, model_two])
def test_papers_instances_fit(draw) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        instance = draw(rng)
        assert 30 <= instance.memory <= 50
        assert all(1 <= request.prompt <= 5 and request.output >= 1 for request in instance.requests)
        assert max(request.prompt + request.output for request in instance.requests) <= instance.memory
        arrivals = [request.arrival for request in instance.requests]
        assert arrivals == sorted(arrivals)
        assert max(arrivals) <= (0 if draw is model_one else 60)


def test_predictions_stay_within_their_error() -> None:
    requests = [RoundRequest(0, 1, 100, 100), RoundRequest(0, 1, 1, 1)] * 200
    predicted = [request.predicted for request in mispredicted(np.random.default_rng(0), requests, 0.5)]
    assert min(predicted[::2]) >= 50
    assert max(predicted[::2]) <= 150
    assert len(set(predicted[::2])) > 50
    assert min(predicted[1::2]) == 1
