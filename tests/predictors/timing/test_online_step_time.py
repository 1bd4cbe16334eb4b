"""Tests of step-time and step-rate estimates: they follow lasting changes and resist single stalls."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, milliseconds, seconds
from controlplane.core.engine_reports import StepCost
from controlplane.core.pool_view import Pace
from predictors.timing.online_step_time import ObservedPace, ReportedPace, StepTime, StepWork


def test_no_pace_before_any_observation():
    assert ObservedPace().pace is None


def test_prior_is_used_until_something_is_observed():
    prior = StepCost(step=0.02, decode=1e-4, cell=1e-7, prompt_token=1e-4)
    expected = Pace(step=milliseconds(20), per_prompt_token=Duration(100_000))
    assert (ObservedPace(prior=prior).pace, ReportedPace(prior).pace) == (expected, expected)
    assert ReportedPace().pace is None
    heard = ObservedPace(prior=prior)
    heard.observe_step(milliseconds(5))
    assert heard.pace == Pace(step=milliseconds(5), per_prompt_token=Duration(0))
    reported = ObservedPace(prior=prior)
    for _ in range(64):
        reported.observe_work(StepWork(0, 1, 0), milliseconds(5))
    assert reported.pace is not None
    assert reported.pace.step == pytest.approx(milliseconds(5), rel=0.05)


def test_steady_work_is_learned_exactly():
    pace = ObservedPace()
    for _ in range(10):
        pace.observe_step(milliseconds(20))
        pace.observe_prefill(100, milliseconds(120))
    assert pace.pace == Pace(step=milliseconds(20), per_prompt_token=milliseconds(1))


def test_prefills_alone_give_a_pace():
    pace = ObservedPace()
    pace.observe_prefill(50, milliseconds(100))
    assert pace.pace == Pace(step=Duration(0), per_prompt_token=milliseconds(2))


def test_single_stall_has_little_effect():
    pace = ObservedPace()
    for _ in range(100):
        pace.observe_step(milliseconds(20))
    pace.observe_step(seconds(30))
    assert pace.pace is not None
    assert pace.pace.step < milliseconds(21)


@pytest.mark.parametrize("now_ms", [2, 200])
def test_a_tenfold_change_is_followed_within_five_memories(now_ms):
    pace = ObservedPace()
    for _ in range(500):
        pace.observe_step(milliseconds(20))
    for _ in range(5 * 64):
        pace.observe_step(milliseconds(now_ms))
    assert pace.pace is not None
    assert pace.pace.step == pytest.approx(milliseconds(now_ms), rel=0.15)


def test_long_prompts_outweigh_short_ones():
    pace = ObservedPace()
    for _ in range(400):
        pace.observe_prefill(1_000, milliseconds(1_000))
        pace.observe_prefill(10, milliseconds(30))
    assert pace.pace is not None
    assert pace.pace.per_prompt_token == pytest.approx(milliseconds(1), rel=0.1)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 10_000), st.integers(0, 10**11)), min_size=1, max_size=60
    )
)
def test_estimate_stays_within_the_observed_range(observations):
    pace = ObservedPace()
    steps, rates = [], []
    for is_step, tokens, took in observations:
        if is_step:
            pace.observe_step(Duration(took))
            steps.append(took)
        else:
            pace.observe_prefill(tokens, Duration(took))
            rates += [took / tokens] if tokens else []
    if not steps and not rates:
        assert pace.pace is None
        return
    assert pace.pace is not None
    assert 0 <= pace.pace.step <= max(steps, default=0)
    assert 0 <= pace.pace.per_prompt_token <= max(rates, default=0) + 1


TRUE = StepCost(step=0.02, decode=2e-4, cell=4e-7, prompt_token=1.5e-4)


def works(random, count):
    for number in range(count):
        decodes = random.randint(0, 60)
        yield StepWork(
            random.randint(1, 2_000) if number % 5 == 0 else 0, decodes, decodes * random.randint(100, 900)
        )


def seconds_of(work, truth):
    return (
        truth.step
        + truth.decode * work.decodes
        + truth.cell * work.cells
        + truth.prompt_token * work.prefill_tokens
    )


def serve(steps, random, truth, count=400, noise=0.05, stalls=0.0):
    for work in works(random, count):
        took = seconds_of(work, truth) * random.lognormvariate(0, noise)
        steps.observe(work, took + (2.0 if random.random() < stalls else 0.0))


def worst_error(steps, random, truth):
    """Ninth decile of the relative error over typical work."""
    errors = sorted(abs(steps.predict(w) / seconds_of(w, truth) - 1) for w in works(random, 200))
    return errors[180]


@pytest.mark.parametrize("factor", [0.02, 1.0, 50.0])
def test_prior_wrong_by_a_factor_of_fifty_is_corrected(factor):
    random = Random(0)
    prior = StepCost(TRUE.step * factor, TRUE.decode * factor, TRUE.cell * factor, TRUE.prompt_token * factor)
    steps = StepTime(prior)
    serve(steps, random, TRUE)
    assert worst_error(steps, random, TRUE) < 0.06
    assert steps.per_prompt_token == pytest.approx(TRUE.prompt_token, rel=0.1)


def test_stalls_have_little_effect():
    random, steps = Random(1), StepTime()
    serve(steps, random, TRUE, stalls=0.03)
    assert worst_error(steps, random, TRUE) < 0.15


def test_a_lasting_change_is_followed():
    random, steps = Random(2), StepTime()
    serve(steps, random, TRUE, 2_000)
    slower = StepCost(0.06, 6e-4, 1.2e-6, 4.5e-4)
    serve(steps, random, slower, 1_000)
    assert worst_error(steps, random, slower) < 0.1


def test_quantiles_have_their_coverage():
    random, steps = Random(3), StepTime()
    serve(steps, random, TRUE, noise=0.2)
    within = [
        seconds_of(w, TRUE) * random.lognormvariate(0, 0.2) <= steps.quantile(w, 0.9)
        for w in works(random, 500)
    ]
    assert sum(within) / 500 == pytest.approx(0.9, abs=0.06)


def test_single_kind_of_step_gives_sane_costs():
    steps = StepTime()
    for _ in range(20_000):
        steps.observe(StepWork(0, 8, 1_000), 0.03)
    assert steps.predict(StepWork(0, 8, 1_000)) == pytest.approx(0.03, rel=0.01)
    assert 0.01 < steps.predict(StepWork(500, 8, 1_000)) < 1.0


def test_reported_steps_give_the_pace_of_the_current_load():
    pace = ObservedPace()
    pace.observe_step(milliseconds(900))
    random = Random(4)
    for work in works(random, 300):
        pace.observe_work(work, seconds(seconds_of(work, TRUE)))
    pace.observe_work(StepWork(0, 10, 4_000), seconds(0.0236))
    assert pace.pace is not None
    assert pace.pace.step == pytest.approx(milliseconds(23.6), rel=0.05)
    assert pace.pace.per_prompt_token == pytest.approx(milliseconds(0.15), rel=0.1)


def test_token_gap_has_quantiles():
    pace, random = ObservedPace(), Random(5)
    assert pace.predicted_token_gap(0.5) is None
    for _ in range(200):
        pace.observe_work(StepWork(0, 8, 1_000), seconds(0.02 * random.lognormvariate(0, 0.2)))
    middle, upper = pace.predicted_token_gap(0.5), pace.predicted_token_gap(0.9)
    assert middle == pytest.approx(milliseconds(20), rel=0.1)
    # e^(0.2 * 1.28) is the ninth decile of the noise.
    assert upper == pytest.approx(milliseconds(25.8), rel=0.12)


def test_shared_steps_bound_an_overestimated_step():
    pace = ObservedPace()
    for _ in range(30):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(40))
    thought = pace.own_step
    for _ in range(200):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(15), is_alone=False)
    assert thought is not None and thought > milliseconds(20)
    assert pace.own_step == milliseconds(15)


def test_concurrent_embedding_is_not_learned_as_step_time():
    pace = ObservedPace()
    for _ in range(400):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(10))
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(30), is_alone=False)
    assert pace.own_step == pytest.approx(milliseconds(10), rel=0.01)
    assert pace.pace is not None
    assert pace.pace.step == pytest.approx(milliseconds(20), rel=0.1)


def test_steps_beside_embeddings_are_enough_to_use_the_model():
    """A step that only ever ran beside embeddings takes no longer alone; how much less is unknown."""
    pace = ObservedPace(prior=StepCost(step=0.05, decode=0.0, cell=0.0, prompt_token=1e-3))
    for _ in range(64):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(20), is_alone=False)
        pace.observe_work(StepWork(100, 8, 1_000), milliseconds(900), is_alone=False)
    assert pace.reports_steps
    assert pace.steps.predict(StepWork(0, 8, 1_000)) == pytest.approx(0.02, rel=0.05)
    assert pace.steps.per_prompt_token == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_stalls_and_slowdown_keep_all_costs_plausible(seed):
    random, steps = Random(seed), StepTime(TRUE)
    for _ in range(60):
        slowness, stalls = random.choice([1.0, 1.0, 1.3, 2.5]), random.choice([0.0, 0.01, 0.05])
        decodes, reads_prompts = random.randint(1, 20), random.random() < 0.3
        for _ in range(random.choice([20, 100, 400])):
            prompt = random.randint(1, 500) if reads_prompts and random.random() < 0.2 else 0
            work = StepWork(prompt, decodes, decodes * random.randint(100, 400))
            took = slowness * seconds_of(work, TRUE) * random.lognormvariate(0, 0.05)
            steps.observe(work, took * (random.uniform(2, 30) if random.random() < stalls else 1.0))
        decoding = StepWork(0, 8, 2_000)
        assert 0.2 < steps.predict(decoding) / seconds_of(decoding, TRUE) < 10
        assert steps.per_prompt_token / TRUE.prompt_token < 20


def paces_after(*steps: tuple[int, float, bool]) -> ObservedPace:
    """Lost share and deviation after 200 repetitions of steps that cost 10 ms plus 0.1 ms per prompt token.

    Each step is (prompt tokens, ms taken, whether no embedding work ran).
    """
    observed = ObservedPace(prior=StepCost(step=0.01, decode=0.0, cell=0.0, prompt_token=1e-4))
    for prefill, took, is_alone in 200 * steps:
        observed.observe_work(StepWork(prefill, 1, 0), milliseconds(took), is_alone=is_alone)
    return observed


def test_prefill_share_follows_prefill_time():
    assert ObservedPace().prefill_share == ObservedPace().prefill_deviation == 0.0
    assert ObservedPace().waited_share == 0.0
    observed = paces_after((0, 10, True), (100, 20, True))
    assert observed.prefill_share == pytest.approx(10 / 30, rel=0.05)
    assert observed.prefill_deviation == pytest.approx(0.005, rel=0.05)


def test_intentional_wait_is_not_step_time():
    observed = ObservedPace(prior=StepCost(step=0.01, decode=0.0, cell=0.0, prompt_token=1e-4))
    for _ in range(200):
        observed.observe_work(StepWork(0, 1, 0), milliseconds(10))
        observed.observe_work(StepWork(0, 1, 0), milliseconds(30), waited=milliseconds(18), is_alone=False)
    assert observed.own_step == pytest.approx(milliseconds(10), rel=0.01)
    assert observed.waited_share == pytest.approx(18 / 40, rel=0.01)
    # The client waits for this time all the same.
    assert observed.predicted_token_gap(0.5) == pytest.approx(milliseconds(20), rel=0.1)
    for _ in range(2_000):
        observed.observe_work(StepWork(0, 1, 0), milliseconds(10))
    assert observed.waited_share < 0.02


def test_prefill_share_counts_prefill_and_not_embedding_time():
    assert paces_after((0, 10, True), (0, 14, False)).prefill_share == 0.0
    both = paces_after((0, 10, True), (100, 20, True), (100, 24, False))
    assert both.prefill_share == pytest.approx(20 / 54, rel=0.05)


def trained(step_ms: float) -> ObservedPace:
    pace = ObservedPace()
    for _ in range(64):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(step_ms))
    return pace


@pytest.mark.parametrize(
    ("step_ms", "pass_ms", "expected"),
    [(30, 20, 1.0), (12, 12, 1 / 6), (10, 10, 0.0), (60, 20, 1.0)],
    ids=["in turns", "beside", "on another device", "after a stall"],
)
def test_a_pass_delays_the_steps_by_what_those_beside_it_take_longer(step_ms, pass_ms, expected):
    pace = trained(10)
    assert pace.pass_delay == 1.0, "nothing is known yet"
    for _ in range(500):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(step_ms), is_alone=False)
        pace.observe_pass(milliseconds(pass_ms))
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(10))
    assert pace.pass_delay == pytest.approx(expected, abs=0.03)


def test_steps_beside_passes_without_a_cost_do_not_add_up():
    pace = trained(10)
    for _ in range(20_000):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(30), is_alone=False)
    assert pace.pass_delay == 1.0
    for _ in range(300):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(15), is_alone=False)
        pace.observe_pass(milliseconds(10))
    assert pace.pass_delay == pytest.approx(0.5, abs=0.05)


def test_a_wait_for_a_pass_is_no_delay_by_it():
    pace = trained(10)
    for _ in range(500):
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(25), waited=milliseconds(12), is_alone=False)
        pace.observe_pass(milliseconds(15))
    assert pace.pass_delay == pytest.approx(3 / 15, abs=0.03)


def test_reports_that_are_read_at_the_same_time_do_not_lower_the_model():
    pace = trained(10)
    for _ in range(300):
        # Of three steps of 12 ms beside an embedding pass the last two are read together.
        for took_ms in (12, 23.95, 0.05):
            pace.observe_work(StepWork(0, 8, 1_000), milliseconds(took_ms), is_alone=False)
    assert pace.steps.predict(StepWork(0, 8, 1_000)) == pytest.approx(0.01, rel=0.05)
    assert pace.own_step == pytest.approx(milliseconds(10), rel=0.05)


def test_a_delay_that_overlaps_with_the_step_in_flight_makes_no_step_short():
    pace = trained(10)
    for _ in range(100):
        # The step of 10 ms was in flight during the delay.
        pace.observe_work(StepWork(0, 8, 1_000), milliseconds(11), waited=milliseconds(10.5), is_alone=False)
    assert pace.steps.predict(StepWork(0, 8, 1_000)) == pytest.approx(0.01, rel=0.05)
    assert pace.own_step == pytest.approx(milliseconds(10), rel=0.05)


def test_a_step_is_compared_with_what_was_expected_before_it():
    model, work = StepTime(), StepWork(0, 8, 4_000)
    model.observe(work, 2 * model.predict(work))
    assert (model.calibration.ratio, model.calibration.error) == (pytest.approx(2.0), pytest.approx(1.0))
