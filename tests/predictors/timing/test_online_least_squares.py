"""Tests of online least squares: convergence, tracking of changes, and unobserved coefficients."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.timing.online_least_squares import OnlineLeastSquares, dot

TRUTH = [2.0, 0.5, 1.0]
DOUBTS = [1.0, 1.0, 1.0]


def observe(fit, random, truth, *, steps, third=True, noise=0.05):
    for _ in range(steps):
        load = [1.0, random.random(), random.random() if third else 0.0]
        fit.observe(load, dot(load, truth) + random.gauss(0, noise), weight=1 / 0.05**2, precisions=DOUBTS)


def a_fit(**options):
    return OnlineLeastSquares([1.0, 1.0, 1.0], decay=0.998, **options)


def test_costs_converge_and_follow_a_change():
    random, fit = Random(0), a_fit()
    observe(fit, random, TRUTH, steps=1_000)
    assert fit.costs == pytest.approx(TRUTH, abs=0.05)
    observe(fit, random, [1.0, 1.5, 0.0], steps=4_000)
    assert fit.costs == pytest.approx([1.0, 1.5, 0.0], abs=0.05)


def test_unobserved_cost_keeps_its_value_and_variance():
    """With forgetting alone, the first noisy observation would determine the coefficient."""
    random, fit = Random(1), a_fit()
    observe(fit, random, TRUTH, steps=1_000)
    observe(fit, random, TRUTH, steps=8_000, third=False)
    assert fit.costs[2] == pytest.approx(TRUTH[2], abs=0.05)
    assert fit.prediction_variance([0.0, 0.0, 1.0], DOUBTS) <= 1 / DOUBTS[2]


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.floats(-10, 100), st.floats(0, 1e4)),
        max_size=80,
    ),
    st.sampled_from([0.0, 0.25]),
)
def test_costs_and_beliefs_respect_their_bounds(observations, least):
    fit = a_fit(least=least)
    for load, total, weight in observations:
        fit.observe(load, total, weight=weight, precisions=DOUBTS)
        assert min(fit.costs) >= 0.0 and min(fit.beliefs) >= least
        assert max(fit.costs) < 1e9


def test_keep_speeds_up_learning():
    random, fit, slow = Random(2), a_fit(), a_fit()
    for one in (fit, slow):
        observe(one, random, TRUTH, steps=1_000)
    fit.keep(0.005)
    for one in (fit, slow):
        observe(one, random, [4.0, 0.5, 1.0], steps=30)
    assert abs(fit.costs[0] - 4.0) < 0.3 < abs(slow.costs[0] - 4.0)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_first_errors_go_to_the_cost_that_caused_them(scale):
    """A fixed part and one that varies are told apart within a few observations, also after a change."""
    fit = OnlineLeastSquares([1.0, 1.0], decay=0.998)
    for truth in ([1.0, scale], [scale, 1.0]):
        fit.keep(0.005)
        for load in ([1.0, 8.0], [1.0, 0.0], [1.0, 4.0]):
            fit.observe(load, dot(load, truth), weight=1 / 0.2**2, precisions=DOUBTS)
        assert fit.costs == pytest.approx(truth, rel=0.15)
