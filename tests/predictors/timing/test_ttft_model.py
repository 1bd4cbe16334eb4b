"""Tests of TTFT forecasts: learned ratio and coverage of the upper quantile."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, milliseconds
from controlplane.core.pool_view import Pace
from predictors.timing.ttft_model import TtftModel, WorkAhead, quantile, steps_until_slot

PACE = Pace(milliseconds(10), milliseconds(0.1))


def serve(time, random, ratio, count, *, waits=0.0):
    """Share within the upper quantile, and the mean relative error of the median, over the last half."""
    within, errors = [], []
    for _ in range(count):
        ahead = WorkAhead(random.randint(10, 2_000), waits * random.randint(1, 50))
        said = time.predict(ahead, PACE)
        took = Duration(round(ahead.work(PACE) * ratio * random.lognormvariate(0, 0.2)))
        time.observe(ahead, PACE, said, took)
        within.append(took <= said.upper)
        errors.append(abs(said.median / took - 1))
    half = count // 2
    return sum(within[half:]) / half, sum(errors[half:]) / half


def test_work_is_prefill_plus_steps_until_a_slot():
    assert WorkAhead(100).work(PACE) == milliseconds(20)
    assert WorkAhead(100, 3.0).work(PACE) == milliseconds(50)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=100), st.floats(0, 1))
def test_quantile_is_that_of_numpy(ratios, level):
    assert quantile(sorted(ratios), level) == np.quantile(ratios, level)


def test_constant_error_is_learned_with_coverage():
    covered, error = serve(TtftModel(), Random(0), 2.5, 600)
    assert covered == pytest.approx(0.9, abs=0.035)
    assert error < 0.2


def test_waiting_requests_have_their_own_ratios():
    time, random = TtftModel(), Random(1)
    serve(time, random, 1.0, 200)
    serve(time, random, 4.0, 200, waits=1.0)
    assert time.predict(WorkAhead(900), PACE).median == pytest.approx(milliseconds(100), rel=0.15)
    assert time.predict(WorkAhead(0, 9.0), PACE).median == pytest.approx(milliseconds(400), rel=0.15)


def test_optimism_is_low_until_requests_have_waited_and_then_their_tenth():
    time, random = TtftModel(), Random(3)
    serve(time, random, 1.0, 50)
    assert time.optimism == 0.1
    serve(time, random, 0.5, 200, waits=1.0)
    # The tenth of a lognormal with deviation 0.2 is exp(-1.28 * 0.2) of its median.
    assert time.optimism == pytest.approx(0.5 * 0.774, rel=0.15)


def test_coverage_recovers_after_a_change():
    time, random = TtftModel(), Random(2)
    serve(time, random, 1.0, 300)
    assert serve(time, random, 3.0, 600)[0] == pytest.approx(0.9, abs=0.04)


def test_steps_until_slot_counts_the_waiting_queue():
    assert steps_until_slot([5.0], [], 2) == 0.0
    assert steps_until_slot([5.0, 9.0], [], 2) == 5.0
    assert steps_until_slot([5.0, 9.0], [3.0], 2) == 8.0
    assert steps_until_slot([5.0, 9.0], [3.0, 10.0], 2) == 9.0
    assert steps_until_slot([], [4.0, 6.0, 1.0], 2) == 5.0
