"""The number of boxes by predicted utilisation, in virtual time with a host that starts and drains boxes."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_control_plane.fleet_studies.scaled_host import ScaledHost
from controlplane.fleet.autoscaling import BoxScaler, ScalingRule

START, LOWER_AFTER = 60.0, 300.0


def rule(**changes: float) -> ScalingRule:
    values = {"start": START, "utilisation": 0.7, "lower_after": LOWER_AFTER, **changes}
    return ScalingRule(**{"min_boxes": 1, "max_boxes": 40, **values})  # type: ignore[arg-type]


def host(demand: Callable[[float], float], running: int, noise: float = 0.0, **changes: float) -> ScaledHost:
    return ScaledHost(demand, BoxScaler(rule(**changes)), running, noise)


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_noisy_load_changes_nothing(seed: int) -> None:
    # 4 boxes' work at 0.7 needs 6 boxes; noise of a tenth must not ask for more than one above them.
    fleet = host(lambda now: 4.0, 6, noise=0.1)
    fleet.run(3_600, seed)
    assert len(fleet.targets) <= 2
    assert {boxes for _, boxes in fleet.targets} <= {6, 7}
    assert not fleet.overloaded


def test_a_step_is_answered_at_once_and_boxes_serve_one_start_later() -> None:
    fleet = host(lambda now: 2.0 if now < 600 else 5.0, 3)
    fleet.run(1_200)
    assert fleet.targets[0][0] <= 600 + 5
    # Nothing was known before the step: its overload lasts as long as a start, and not much longer.
    assert max(fleet.overloaded) <= 600 + START + 15
    assert fleet.running >= 5 / 0.7
    # The step is not taken for growth.
    assert max(boxes for _, boxes in fleet.targets) == 8


def test_a_ramp_is_met_one_start_time_ahead() -> None:
    # The work grows by one and a half boxes in the time that a box needs to start.
    fleet = host(lambda now: 3.0 + max(0.0, now - 300) * 1.5 / START, 5, noise=0.02)
    fleet.run(900)
    # The growth is clear after half a start time; the first box ordered for it serves one start time later.
    assert all(at < 300 + 1.5 * START for at in fleet.overloaded)
    assert len(fleet.overloaded) <= 5
    needed = fleet.demand(fleet.now) / 0.7
    assert needed <= fleet.target <= 1.3 * needed + 3


def test_without_the_prediction_the_same_ramp_overloads() -> None:
    class Reactive(BoxScaler):
        def predicted_load(self) -> float:
            return self._loads[-1][1]

    ramp = host(lambda now: 1.0 + max(0.0, now - 300) * 1.5 / START, 2, noise=0.02)
    reactive = ScaledHost(ramp.demand, Reactive(rule()), 2, noise=0.02)
    ramp.run(600)
    reactive.run(600)
    assert len(ramp.overloaded) < len(reactive.overloaded)


def test_bursts_that_come_again_keep_their_boxes() -> None:
    # Twenty seconds at three times the load in every two minutes: no box is removed between bursts.
    fleet = host(lambda now: 6.0 if now % 120 >= 100 else 2.0, 3)
    fleet.run(3_600)
    raised = [boxes for _, boxes in fleet.targets]
    assert raised == sorted(raised)
    assert fleet.running >= 6 / 0.7
    late = [at for at in fleet.overloaded if at > 600]
    assert not late


def test_boxes_are_removed_one_by_one_after_a_while() -> None:
    fleet = host(lambda now: 7.0 if now < 600 else 2.0, 10)
    fleet.run(2_400)
    removed = [at for at, boxes in fleet.targets]
    assert [boxes for _, boxes in fleet.targets] == list(range(9, 2, -1))
    assert removed[0] >= 600 + LOWER_AFTER
    gaps = [later - earlier for earlier, later in pairwise(removed)]
    assert min(gaps) >= START
    assert not fleet.overloaded


def test_no_box_is_removed_while_one_starts_or_drains() -> None:
    scaler = BoxScaler(rule())
    for now in range(400):
        assert scaler.target([0.1] * 6, 6, 8, float(now)) == 8
    assert scaler.target([0.1] * 8, 8, 8, 400.0) == 7
    for now in range(401, 600):
        assert scaler.target([0.1] * 8, 8, 7, float(now)) == 7
    assert scaler.target([0.1] * 7, 7, 7, 600.0) == 6


def test_a_scaler_that_has_just_begun_removes_nothing() -> None:
    scaler = BoxScaler(rule())
    targets = [scaler.target([0.0] * 5, 5, 5, float(now)) for now in range(1_000, 1_000 + int(LOWER_AFTER))]
    assert set(targets) == {5}
    assert scaler.target([0.0] * 5, 5, 5, 1_000 + LOWER_AFTER) == 4


def test_without_reports_the_number_stays() -> None:
    scaler = BoxScaler(rule(max_boxes=6))
    assert scaler.target([], 4, 4, 0.0) == 4
    assert scaler.target([], 0, 4, 1.0) == 4
    assert scaler.target([], 0, 9, 2.0) == 6


def test_a_box_that_has_just_started_adds_no_load() -> None:
    # Two boxes' work at 0.9 needs three; the third one runs, and has reported nothing or no load yet.
    scaler = BoxScaler(rule())
    assert scaler.target([0.9, 0.9], 2, 2, 0.0) == 3
    assert scaler.target([0.9, 0.9], 3, 3, 1.0) == 3
    assert scaler.target([0.9, 0.9, 0.0], 3, 3, 2.0) == 3


def test_an_overloaded_fleet_at_most_triples() -> None:
    assert BoxScaler(rule()).target([80.0, 120.0], 2, 2, 0.0) == 6


@given(
    steps=st.lists(
        st.tuples(st.lists(st.floats(0, 20), max_size=5), st.integers(0, 8), st.floats(0, 400)), max_size=60
    ),
    least=st.integers(1, 3),
    more=st.integers(0, 5),
)
def test_the_target_stays_within_its_bounds_and_falls_by_one(
    steps: list[tuple[list[float], int, float]], least: int, more: int
) -> None:
    scaler = BoxScaler(rule(min_boxes=least, max_boxes=least + more))
    target, now = least, 0.0
    for uses, running, passed in steps:
        now += passed
        found = scaler.target(uses, running, target, now)
        assert least <= found <= least + more
        assert found >= target - 1
        target = found
