"""Tests of forecasts from the history of a class and model, limited by max_tokens."""

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predictors.output_length.history_predictor import HistoryQuantiles, MaxTokens


def teach(predictor, a_request, lengths, **kind):
    for length in lengths:
        predictor.observe(a_request(**kind), length)


def test_without_history_the_forecast_is_uniform(a_request):
    forecast = HistoryQuantiles().forecast(a_request(max_tokens=401))
    assert [forecast.quantile(level) for level in (0, 0.5, 1)] == [1, 201, 401]


def test_max_tokens_forecasts_the_limit(a_request):
    forecast = MaxTokens().forecast(a_request(max_tokens=400))
    assert forecast.mean == 400


def test_quantiles_of_the_class(a_request):
    predictor = HistoryQuantiles()
    teach(predictor, a_request, range(1, 100), class_name="chat")
    teach(predictor, a_request, [900] * 99, class_name="batch")
    forecast = predictor.forecast(a_request(class_name="chat"))
    assert [forecast.quantile(level) for level in (0, 0.1, 0.5, 0.9, 0.99, 1)] == pytest.approx(
        [1, 10, 50, 90, 99, 198]
    )


def test_new_class_uses_the_history_of_its_model(a_request):
    predictor = HistoryQuantiles(enough=20)
    teach(predictor, a_request, [70] * 19, class_name="chat")
    assert predictor.forecast(a_request(class_name="new")).quantile(0.5) == pytest.approx(500.5)
    teach(predictor, a_request, [70], class_name="batch")
    assert predictor.forecast(a_request(class_name="new")).quantile(0.5) == 70
    assert predictor.forecast(a_request(class_name="new", model="other")).quantile(0.5) > 400


def test_window_drops_old_outputs(a_request):
    predictor = HistoryQuantiles(window=50)
    teach(predictor, a_request, [500] * 50)
    teach(predictor, a_request, [5] * 50)
    assert predictor.forecast(a_request()).tokens[:-1] == (5,) * 7


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 5_000), max_size=120),
    st.integers(1, 4_000),
    st.integers(1, 100),
    st.integers(1, 30),
)
def test_forecast_is_monotone_and_within_max_tokens(a_request, lengths, max_tokens, window, enough):
    predictor = HistoryQuantiles(window=window, enough=enough)
    teach(predictor, a_request, lengths)
    forecast = predictor.forecast(a_request(max_tokens=max_tokens))
    assert list(forecast.tokens) == sorted(forecast.tokens)
    assert 0 <= forecast.tokens[0] <= forecast.tokens[-1] <= max_tokens
    if min(window, len(lengths)) >= enough:
        recent = sorted(lengths[-window:])
        assert min(recent[0], max_tokens) == forecast.tokens[0]
        assert min(recent[-1], max_tokens) <= forecast.tokens[-1]


def test_coverage_on_lognormal_lengths(a_request):
    """Log-normal lengths with a median of 45 tokens; 3 standard deviations of 2,000 draws are 0.02."""
    random = Random(3)
    predictor = HistoryQuantiles()
    within: Counter[float] = Counter()
    for number in range(2_512):
        request, length = a_request(), max(1, round(random.lognormvariate(3.807, 1.131)))
        if number >= 512:
            forecast = predictor.forecast(request)
            for level in (0.1, 0.5, 0.9):
                within[level] += length <= forecast.quantile(level)
        predictor.observe(request, length)
    assert all(within[level] / 2_000 == pytest.approx(level, abs=0.04) for level in (0.1, 0.5, 0.9))
    assert predictor.calibration.coverage()["chat"] == pytest.approx(0.9, abs=0.05)
