"""What hindsight serves, where it can be said without a linear program."""

import pytest

from backends.vllm.simulation.stepped_engine import Setup
from benchmark_control_plane.experiments.engine.bounds import fluid_bound, with_hindsight
from benchmark_control_plane.experiments.engine.replay import ReplayWindow
from benchmark_control_plane.experiments.engine.workload import Offer, TokenObjectives

# A hundred blocks of 16 tokens; a full pool takes about 31 ms a step, so 90 tokens take about 3 s.
SETUP = Setup(blocks=100)
PROMISE = TokenObjectives(ttft=1.0, gap=1.0)


def served(*offers: Offer) -> float:
    return with_hindsight(SETUP, iter(offers), ReplayWindow(0, len(offers)), PROMISE, 1.0).strict


def test_all_are_served_that_fit_beside_each_other():
    assert served(Offer(0.0, 600, 90, 90), Offer(0.0, 600, 90, 90)) == pytest.approx(1.0)


def test_of_two_that_each_need_the_pool_at_once_one_is_served():
    assert served(Offer(0.0, 1500, 90, 90), Offer(0.1, 1500, 90, 90)) == pytest.approx(0.5, abs=0.05)


def test_both_are_served_when_the_second_comes_as_the_first_ends():
    assert served(Offer(0.0, 1500, 90, 90), Offer(3.5, 1500, 90, 90)) == pytest.approx(1.0)


def test_what_is_served_holds_memory_for_its_promise():
    """About 98 of 100 blocks for 3 s, in the 6 s until the other comes."""
    offers = [Offer(0.0, 1500, 90, 90), Offer(6.0, 1500, 90, 90)]
    outcome = with_hindsight(SETUP, iter(offers), ReplayWindow(0, 2), PROMISE, 1.0)
    assert outcome.held_share == outcome.kept_share == pytest.approx(0.5, abs=0.15)


def test_a_promise_to_start_later_lets_more_be_served():
    offers = [Offer(0.3 * i, 1000, 60, 60) for i in range(6)]
    patient = with_hindsight(SETUP, iter(offers), ReplayWindow(0, 6), TokenObjectives(ttft=8.0, gap=1.0), 1.0)
    assert patient.strict > served(*offers) + 0.1


def test_the_small_ones_are_chosen():
    small = [Offer(0.0, 700, 90, 90)] * 2
    assert served(Offer(0.0, 1500, 90, 90), *small) == pytest.approx(2 / 3, abs=0.1)


def test_those_before_the_window_are_not_counted():
    offers = [Offer(0.0, 1500, 90, 90), Offer(0.1, 1500, 90, 90)]
    outcome = with_hindsight(SETUP, iter(offers), ReplayWindow(1, 1), PROMISE, 1.0)
    assert outcome.strict == pytest.approx(1.0)
    assert outcome.unfinished == pytest.approx(0.0, abs=1e-6)


def test_serving_fewer_takes_a_higher_rate():
    lengths = [(100, 50 * i) for i in range(1, 20)]
    rates = [fluid_bound(lengths, Setup(), served) for served in (1.0, 0.9, 0.6)]
    assert rates == sorted(rates)


def test_prompts_take_the_time_of_those_that_decode():
    """Twenty a second, each of 0.14 s to read: a seventh of them is all the device can do beside decoding."""
    offers = [Offer(0.05 * i, 1_000, 40, 40) for i in range(400)]
    plenty = Setup(blocks=20_000)
    outcome = with_hindsight(plenty, iter(offers), ReplayWindow(0, 400), PROMISE, 20.0)
    assert 0.2 < outcome.strict < 0.6
