"""Tests of the series forecaster: coverage on several load shapes, and a lower loss than simple baselines."""

import numpy as np
import pytest

from predictors.load.series import LEVELS, SeriesForecaster, find_period

SECONDS = np.arange(1_500)
PERIOD = 37


def poisson(rng):
    return rng.poisson(40, len(SECONDS))


def bursty(rng):
    return rng.negative_binomial(2, 2 / 42, len(SECONDS))


def periodic(rng):
    return rng.poisson(30 * (1 + 0.8 * np.sin(2 * np.pi * SECONDS / PERIOD)))


def mostly_silent(rng):
    """Off for about a minute, then on for about twenty seconds."""
    is_on, on = False, []
    for _ in SECONDS:
        is_on = rng.random() > (1 / 20 if is_on else 59 / 60)
        on.append(is_on)
    return np.where(on, rng.poisson(25, len(SECONDS)), 0)


def pinball(said, value):
    level = np.array(LEVELS)
    return np.where(value >= said, level * (value - said), (1 - level) * (said - value))


@pytest.mark.long
@pytest.mark.parametrize("load", [poisson, bursty, periodic, mostly_silent])
def test_coverage_and_loss_on_every_load(load):
    series = load(np.random.default_rng(3))
    one, below, within, judged = SeriesForecaster(), np.zeros(3), np.zeros(3), 0
    loss = {"own": 0.0, "last": 0.0, "mean": 0.0}
    for step, value in enumerate(series):
        if step >= 100:
            said = np.array(one.quantiles)
            below, within, judged = below + (value < said), within + (value <= said), judged + 1
            past = series[step - 60 : step]
            naive = {"own": said, "last": np.full(3, past[-1]), "mean": np.full(3, past.mean())}
            loss = {name: total + pinball(naive[name], value) for name, total in loss.items()}
        one.observe(float(value))
    level = np.array(LEVELS)
    assert (below / judged <= level + 0.03).all()
    assert (within / judged >= level - 0.03).all()
    assert (loss["own"] <= 1.02 * np.minimum(loss["last"], loss["mean"])).all()


def test_period_is_found_and_used():
    rng = np.random.default_rng(0)
    # Noise may shift the peak by one lag.
    assert find_period(periodic(rng)[:512]) == pytest.approx(PERIOD, abs=1)
    assert find_period(poisson(rng)[:512]) is None
    assert find_period(np.zeros(512)) is None
    # A random walk has no period.
    assert find_period(np.cumsum(rng.normal(size=512))) is None


def test_no_forecast_before_enough_values_and_zero_for_an_idle_source():
    one = SeriesForecaster()
    for _ in range(19):
        one.observe(0.0)
    assert one.quantiles is None
    one.observe(0.0)
    assert one.quantiles == (0.0, 0.0, 0.0)
    assert one.dispersion == 1.0


def test_load_change_is_followed_within_a_minute():
    rng = np.random.default_rng(5)
    one = SeriesForecaster()
    for value in (*rng.poisson(10, 300), *rng.poisson(100, 60)):
        one.observe(float(value))
    assert 90 <= one.quantiles[0] <= 110
    assert one.quantiles[0] <= one.quantiles[1] <= one.quantiles[2]


def test_dispersion_is_variance_over_mean():
    rng = np.random.default_rng(1)
    steady, burst = SeriesForecaster(), SeriesForecaster()
    for one, series in ((steady, poisson(rng)), (burst, bursty(rng))):
        for value in series[:512]:
            one.observe(float(value))
    assert steady.dispersion == pytest.approx(1.0, abs=0.25)
    assert burst.dispersion > 10
