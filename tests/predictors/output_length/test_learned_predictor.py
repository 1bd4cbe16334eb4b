"""Tests of the learned predictor: choice between model and history, and coverage of both."""

from dataclasses import replace
from random import Random

import pytest

from predictors.output_length.checkpoint import Checkpoint
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import fit

pytestmark = pytest.mark.long


def serve(lengths, requests):
    """Share of outputs within their forecast 0.9 quantile."""
    within = []
    for request, tokens in requests:
        within.append(tokens <= lengths.forecast(request).quantile(0.9))
        lengths.observe(request, tokens)
    return sum(within) / len(within)


def test_cold_start_forecast_is_moderate(a_request):
    forecast = LearnedLengths().forecast(a_request(prompt="Tell me about bees.", max_tokens=100_000))
    assert 30 < forecast.quantile(0.5) < 1_000
    assert forecast.quantile(1.0) < 20_000


def test_forecast_is_within_the_limit(a_request):
    forecast = LearnedLengths().forecast(a_request(prompt="Write a book.", max_tokens=7))
    assert (forecast.tokens[0] >= 1, forecast.tokens[-1]) == (True, 7)


def test_informative_model_beats_history_with_coverage(traffic, a_request):
    random, lengths = Random(0), LearnedLengths()
    serve(lengths, traffic(random, 500))
    lengths.swap(fit(lengths.examples.table()))
    serve(lengths, traffic(random, 200))
    assert serve(lengths, traffic(random, 600)) == pytest.approx(0.9, abs=0.03)
    medians = {kind: lengths.forecast(a_request(prompt=f"{kind} topic 3", max_tokens=8_000)).quantile(0.5)
               for kind in ("list", "explain", "essay")}  # fmt: skip
    assert medians == {
        "list": pytest.approx(40, rel=0.2),
        "explain": pytest.approx(200, rel=0.2),
        "essay": pytest.approx(900, rel=0.2),
    }


@pytest.mark.parametrize("use_prior", [True, False])
@pytest.mark.parametrize("count", [5, 60])
def test_a_later_forecast_is_that_of_a_request_which_arrives_then(traffic, a_request, use_prior, count):
    request = a_request(prompt="list topic 3", max_tokens=8_000)
    early, late = LearnedLengths(use_prior=use_prior), LearnedLengths(use_prior=use_prior)
    early.forecast(request)
    for lengths in (early, late):
        serve(lengths, traffic(Random(5), count))
    assert early.forecast(request) == late.forecast(request)


def test_outdated_model_is_replaced_by_history(traffic, a_request):
    """Output lengths stop depending on the features of the model."""
    random, lengths = Random(1), LearnedLengths()
    serve(lengths, traffic(random, 400))
    lengths.swap(fit(lengths.examples.table()))
    for _ in range(600):
        request = a_request(prompt=f"{random.choice(['list', 'essay'])} topic", max_tokens=8_000)
        lengths.forecast(request)
        lengths.observe(request, random.randint(95, 105))
    found = [lengths.forecast(a_request(prompt=f"{k} topic", max_tokens=8_000)) for k in ("list", "essay")]
    assert [f.quantile(0.5) for f in found] == [pytest.approx(100, abs=8)] * 2


def test_coverage_recovers_within_500_after_a_swap(traffic):
    random, lengths = Random(2), LearnedLengths()
    serve(lengths, traffic(random, 500))
    lengths.swap(fit(lengths.examples.table()))
    serve(lengths, traffic(random, 500))
    serve(lengths, traffic(random, 500, factor=3.0))
    assert serve(lengths, traffic(random, 500, factor=3.0)) == pytest.approx(0.9, abs=0.025)


def test_restore_continues_the_saved_state(traffic, a_request):
    random, lengths = Random(3), LearnedLengths(max_examples=300)
    serve(lengths, traffic(random, 400))
    lengths.swap(fit(lengths.examples.table()))
    serve(lengths, traffic(random, 100))
    again = LearnedLengths(max_examples=300)
    again.restore(Checkpoint(lengths.examples.table(), lengths.model, lengths.calibration_state()))
    asked = a_request(prompt="essay topic 4", max_tokens=8_000)
    assert again.forecast(asked).quantile(0.5) == pytest.approx(
        lengths.forecast(asked).quantile(0.5), rel=0.02
    )
    assert len(again.examples) == 300


def test_request_that_cannot_stop_early_is_forecast_at_its_limit(traffic, a_request):
    lengths = LearnedLengths()
    serve(lengths, traffic(Random(4), 50))
    forced = replace(a_request(prompt="list topic 1", max_tokens=700), runs_to_limit=True)
    seen = lengths.examples.seen
    assert lengths.forecast(forced).quantile(0.01) == lengths.forecast(forced).quantile(0.99) == 700
    lengths.observe(forced, 700)
    assert lengths.examples.seen == seen


def test_withdrawn_requests_do_not_displace_running_ones(a_request):
    lengths = LearnedLengths(use_prior=False)
    long = a_request()
    lengths.forecast(long)
    for _ in range(5_000):
        lengths.forecast(request := a_request())
        lengths.withdraw(request)
    lengths.observe(long, 900)
    assert lengths.examples.seen == 1


def test_forecast_is_computed_again_only_after_an_outcome_or_a_new_model(traffic, a_request):
    random, lengths = Random(5), LearnedLengths()
    serve(lengths, traffic(random, 300))
    request, other = (a_request(prompt="list topic 3", max_tokens=8_000) for _ in range(2))
    first = lengths.forecast(request)
    assert lengths.forecast(request) is first
    lengths.forecast(other)
    lengths.observe(other, 700)
    after_outcome = lengths.forecast(request)
    assert after_outcome != first
    lengths.swap(fit(lengths.examples.table()))
    assert lengths.forecast(request) != after_outcome
    lengths.withdraw(request)
    assert request.id not in lengths._current
