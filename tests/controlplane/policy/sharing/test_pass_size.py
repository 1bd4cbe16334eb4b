"""A pass is as long as the SLOs that it meets outweigh those that its pause breaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import NO_TIME, Duration, milliseconds
from controlplane.core.forecast import LengthForecast
from controlplane.policy.sharing.pass_size import (
    LongestPass,
    MeanPace,
    PauseCosts,
    PendingWork,
    TimeLeft,
    WeightedSlo,
    call_values,
    inputs_to_compute,
)

UNIFORM = LengthForecast((0.0, 1.0), (1.0, 101.0))


def pace(debt: float = 0.0, *, done: int = 1, forecast: LengthForecast | None = UNIFORM, regained=0.01):
    return MeanPace(debt, regained, done, 101, 50, forecast)


def risk(objective, pause: float) -> float:
    return (objective.added_risk([pause]) or [0.0])[0]


@pytest.mark.parametrize(
    ("elapsed", "debt", "regained"),
    [
        pytest.param(0.8, -0.1, 0.04, id="ahead"),
        pytest.param(2.8, 1.9, 0.04, id="as much behind as the tokens to come regain with the reserve"),
        pytest.param(3.0, 2.0, 0.05, id="behind by more: the whole objective counts"),
        pytest.param(9.0, 8.0, 0.05, id="lost"),
    ],
)
def test_passes_leave_a_tenth_of_a_pace_until_it_is_used_up(elapsed, debt, regained):
    found = MeanPace.of(0.1, elapsed, 0.05, 11, 101, 50, None)
    assert (found.debt, found.regained) == (pytest.approx(debt), pytest.approx(regained))


FORECASTS = st.none() | st.sampled_from([UNIFORM, LengthForecast((0.0, 0.5, 1.0), (1.0, 10.0, 80.0))])
OBJECTIVES = st.builds(TimeLeft, st.floats(-1, 1)) | st.builds(
    MeanPace, st.floats(-1, 1), st.floats(-0.01, 0.05), st.integers(1, 90), st.just(101),
    st.integers(1, 100), FORECASTS,
)  # fmt: skip


SLOS = st.builds(WeightedSlo, st.floats(0, 4), st.lists(OBJECTIVES, min_size=1, max_size=2).map(tuple))


def spare(seconds: float) -> PauseCosts:
    return PauseCosts([WeightedSlo(1.0, (TimeLeft(seconds),))])


@pytest.mark.parametrize(("spare", "expected"), [(0.01, 1.0), (0.02, 0.0), (0.0, 1.0), (-0.001, 0.0)])
def test_a_pause_breaks_a_deadline_that_leaves_less_time_unless_it_is_lost_already(spare, expected):
    assert risk(TimeLeft(spare), 0.02) == expected


def test_a_pause_takes_its_part_of_the_spare_time_of_each_that_waits():
    first = WeightedSlo(2.0, (TimeLeft(0.1), TimeLeft(0.4)))
    second = WeightedSlo(1.0, (TimeLeft(-0.1), TimeLeft(0.2)))
    without_a_deadline = WeightedSlo(4.0, (pace(),))
    costs = PauseCosts([], [first, second, without_a_deadline, WeightedSlo(1.0, (TimeLeft(-1.0),))])
    assert costs([0.05, 0.1, 0.15, 1.0]) == pytest.approx(
        [0.3 * (1.0 + 0.25), 2.0 + 0.3 * 0.5, 2.0 + 0.3 * 0.75, 3.0]
    )


def test_a_mean_pace_is_at_risk_if_the_output_may_end_before_the_pause_is_regained():
    # 0.2 s take 20 tokens of 10 ms to regain; 19 % of the outputs end before that.
    assert risk(pace(), 0.2) == pytest.approx(0.19)
    assert risk(pace(debt=-0.191), 0.2) == 0.0, "the next token is enough"
    assert risk(pace(debt=-0.1), 0.2) == pytest.approx(0.09)
    assert risk(pace(debt=0.1), 0.2) == pytest.approx(0.29 - 0.09), "only what the pause adds counts"
    assert risk(pace(done=51), 0.2) == pytest.approx(0.19 / 0.5), "outputs that ended before do not count"
    assert risk(pace(), 1.01) == 1.0, "no output is that long"
    assert risk(pace(debt=2.0), 1.0) == 0.0, "it is late in any case"


@pytest.mark.parametrize(("pause", "expected"), [(0.5, 0.0), (0.51, 1.0)])
def test_without_a_forecast_the_expected_length_decides(pause, expected):
    assert risk(pace(forecast=None), pause) == expected


def test_a_request_with_several_objectives_has_one_slo():
    costs = PauseCosts([WeightedSlo(2.0, (TimeLeft(0.01), pace())), WeightedSlo(1.0, ())])
    assert costs([0.2]) == [2.0]
    assert PauseCosts([WeightedSlo(1.0, ())])([0.2]) == [0.0]
    assert PauseCosts([WeightedSlo(1.0, (TimeLeft(0.3),))], stretch=2.0)([0.1, 0.2]) == [0.0, 1.0]


def test_a_pass_is_a_pause_of_the_time_by_which_it_delays_the_steps():
    costs = PauseCosts([WeightedSlo(1.0, (TimeLeft(0.3),))], stretch=2.0, pass_delay=0.25)
    assert costs([0.5, 0.7]) == [0.0, 1.0]


def test_steps_slower_than_the_objective_regain_nothing():
    assert risk(pace(debt=-0.1, regained=-0.01), 0.05) == 0.0
    assert risk(pace(debt=-0.1, regained=-0.01), 0.2) == 1.0


def test_an_output_that_outran_its_forecast_may_grow_by_half():
    short = LengthForecast((0.0, 1.0), (1.0, 20.0))
    assert risk(pace(done=40, forecast=short), 0.1) == pytest.approx(10 / 20)


@given(st.lists(SLOS, max_size=5), SLOS, st.floats(0, 1), st.floats(0, 1))
def test_longer_pauses_and_more_requests_never_cost_less(slos, one_more, a, b):
    pauses = sorted((a, b))
    shorter, longer = PauseCosts(slos)(pauses)
    assert 0.0 <= shorter <= longer + 1e-9
    assert longer <= PauseCosts([*slos, one_more])(pauses)[1] + 1e-9
    assert longer <= sum(slo.weight for slo in slos) + 1e-9


def test_calls_are_worth_the_share_of_the_device_that_they_need_to_be_in_time():
    first = PendingWork(2.0, milliseconds(100), milliseconds(10))
    second = PendingWork(3.0, milliseconds(100), milliseconds(30))
    assert call_values([first]) == pytest.approx([0.2])
    assert call_values([first, second]) == pytest.approx([0.8, 1.2]), "40 of the next 100 ms"


@pytest.mark.parametrize("time_left", [None, milliseconds(5), milliseconds(-5)])
def test_a_call_that_no_slo_depends_on_is_worth_little(time_left):
    assert call_values([PendingWork(2.0, time_left, milliseconds(10))]) == [0.02]


def test_a_call_that_would_be_late_with_the_next_pass_is_worth_its_weight():
    call = PendingWork(2.0, milliseconds(100), milliseconds(20))
    assert call_values([call]) == pytest.approx([0.4])
    assert call_values([call], milliseconds(60)) == pytest.approx([1.0]), "20 of the 40 ms that are left then"
    assert call_values([call], milliseconds(90)) == [2.0]
    assert call_values([call], milliseconds(200)) == [2.0]


def took(inputs: int) -> Duration:
    return milliseconds(3 + inputs)


def test_without_a_cost_the_whole_pass_starts():
    assert inputs_to_compute([0.0] * 9, took, None, NO_TIME) == 9
    assert inputs_to_compute([], took, None, NO_TIME) == 0


def test_a_pass_takes_the_inputs_whose_worth_exceeds_their_cost():
    limit = spare(0.0085)
    assert inputs_to_compute([0.1] * 9, took, limit, NO_TIME) == 5, "six would break the SLO"
    assert inputs_to_compute([0.3] * 9, took, limit, NO_TIME) == 9, "nine are worth more than it"
    assert inputs_to_compute([0.1] * 9, took, spare(0.0), NO_TIME) == 0


def test_a_pass_is_free_once_its_floor_has_accumulated():
    blocked = spare(0.0)
    assert inputs_to_compute([1e-3], took, blocked, milliseconds(75)) == 0
    assert inputs_to_compute([1e-3] * 4, took, blocked, milliseconds(77)) == 1, "4 of 80 ms"
    assert inputs_to_compute([1e-3] * 99, took, blocked, milliseconds(10**6)) == 46, "at most 50 ms"
    assert inputs_to_compute([1e-3] * 9, lambda n: 60 * took(n), blocked, milliseconds(10**6)) == 1


@given(
    st.lists(st.floats(0, 2), max_size=80),
    st.lists(SLOS, max_size=4),
    st.integers(0, 10**9).map(Duration),
)
def test_the_chosen_pass_breaks_no_more_than_it_keeps(values, slos, idle):
    cost = PauseCosts(slos)
    size = inputs_to_compute(values, took, cost, idle)
    assert 0 <= size <= len(values)
    if size and took(size) > idle:
        assert cost([took(size) / 1e9])[0] < sum(values[:size]) + 1e-9


def test_a_pass_takes_a_quarter_of_the_shortest_objective_of_recent_calls():
    bound = LongestPass()
    bound.record(None)
    assert bound.inputs(100, took, start=0.0) == 100
    bound.record(milliseconds(400))
    bound.record(milliseconds(4_000))
    longest = bound.inputs(10**6, took, start=0.0)
    assert took(longest) <= milliseconds(100) < took(longest + 1)
    for _ in range(64):
        bound.record(milliseconds(4_000))
    assert bound.inputs(10**6, took, start=0.0) > 4 * longest


def test_a_short_objective_does_not_make_passes_shorter_than_eight_starts():
    bound = LongestPass()
    bound.record(Duration(1))
    longest = bound.inputs(10**6, took, start=float(milliseconds(5)))
    assert took(longest) <= milliseconds(40) < took(longest + 1)
    assert bound.inputs(1, took, start=0.0) == bound.inputs(9, lambda _: milliseconds(1), start=0.0) == 1
