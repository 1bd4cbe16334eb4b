"""The bound with hindsight, on cases with a known result."""

import pytest

from backends.vllm.simulation.stepped_engine import SteppedEngineSetup
from benchmark_control_plane.experiments.engine.bounds import fluid_bound, with_hindsight
from benchmark_control_plane.experiments.engine.engine_replay import ReplayWindow
from benchmark_control_plane.experiments.engine.offered_load import Offer, TokenObjectives

# A hundred blocks of 16 tokens; a full pool takes about 31 ms a step, so 90 tokens take about 3 s.
SETUP = SteppedEngineSetup(blocks=100)
OBJECTIVES = TokenObjectives(ttft=1.0, gap=1.0)


def served(*offers: Offer) -> float:
    return with_hindsight(SETUP, iter(offers), ReplayWindow(0, len(offers)), OBJECTIVES, 1.0).strict


def test_requests_that_fit_together_are_all_served():
    assert served(Offer(0.0, 600, 90, 90), Offer(0.0, 600, 90, 90)) == pytest.approx(1.0)


def test_one_of_two_requests_that_each_fill_the_pool_is_served():
    assert served(Offer(0.0, 1500, 90, 90), Offer(0.1, 1500, 90, 90)) == pytest.approx(0.5, abs=0.05)


def test_both_are_served_if_the_second_arrives_when_the_first_ends():
    assert served(Offer(0.0, 1500, 90, 90), Offer(3.5, 1500, 90, 90)) == pytest.approx(1.0)


def test_memory_held_by_served_requests():
    """About 98 of 100 blocks for 3 s, within the 6 s until the second arrival."""
    offers = [Offer(0.0, 1500, 90, 90), Offer(6.0, 1500, 90, 90)]
    outcome = with_hindsight(SETUP, iter(offers), ReplayWindow(0, 2), OBJECTIVES, 1.0)
    assert outcome.held_share == outcome.met_share == pytest.approx(0.5, abs=0.15)


def test_a_longer_ttft_objective_serves_more():
    offers = [Offer(0.3 * i, 1000, 60, 60) for i in range(6)]
    relaxed = with_hindsight(SETUP, iter(offers), ReplayWindow(0, 6), TokenObjectives(ttft=8.0, gap=1.0), 1.0)
    assert relaxed.strict > served(*offers) + 0.1


def test_small_requests_are_chosen():
    small = [Offer(0.0, 700, 90, 90)] * 2
    assert served(Offer(0.0, 1500, 90, 90), *small) == pytest.approx(2 / 3, abs=0.1)


def test_requests_before_the_window_are_not_counted():
    offers = [Offer(0.0, 1500, 90, 90), Offer(0.1, 1500, 90, 90)]
    outcome = with_hindsight(SETUP, iter(offers), ReplayWindow(1, 1), OBJECTIVES, 1.0)
    assert outcome.strict == pytest.approx(1.0)
    assert outcome.unfinished == pytest.approx(0.0, abs=1e-6)


def test_the_fluid_bound_rises_as_fewer_are_served():
    lengths = [(100, 50 * i) for i in range(1, 20)]
    rates = [fluid_bound(lengths, SteppedEngineSetup(), served) for served in (1.0, 0.9, 0.6)]
    assert rates == sorted(rates)


@pytest.mark.long
def test_prefill_time_limits_decoding():
    """20 requests per second with 0.14 s of prefill each: the device sustains about a seventh of them."""
    offers = [Offer(0.05 * i, 1_000, 40, 40) for i in range(400)]
    plenty = SteppedEngineSetup(blocks=20_000)
    outcome = with_hindsight(plenty, iter(offers), ReplayWindow(0, 400), OBJECTIVES, 20.0)
    assert 0.2 < outcome.strict < 0.6
