"""What a prediction says of each class, from replays that no simulation was needed for."""

from dataclasses import replace
from math import hypot

import pytest

from benchmark_control_plane.decision_replay import what_if
from benchmark_control_plane.decision_replay.prediction_error import paired_error
from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.decision_replay.self_check import SelfCheck
from tests.benchmark_control_plane.tuning.synthetic_blocks import block

MET, LATE = RequestResult("met", 10.0), RequestResult("late", 90.0)


class CountedRows(list):
    """Rows that count how often they are read from the first to the last."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


OTHER = {"scheduling": {"ordering": "fcfs"}}


def predicted(traffic, check, monkeypatch, after, slow_before=None, slow_after=None):
    """The prediction of a configuration under which replays end in `after`, on a slower device in others."""

    def results(traffic, sections, *, machine=None, seed=0):
        if machine is None:
            return after
        return (slow_after if sections is OTHER else slow_before) or check.replayed

    monkeypatch.setattr(what_if, "replayed_results", results)
    return what_if.predict(traffic, check, OTHER, note=lambda text: None)


def test_the_rows_are_read_a_few_times_and_not_once_for_each_request(monkeypatch):
    traffic = block().traffic
    rows = CountedRows(traffic.rows)
    results = [MET] * len(rows)
    found = predicted(replace(traffic, rows=rows), SelfCheck([], [], results), monkeypatch, results)
    assert [each.imputed for each in found.classes] == [0.0, 0.0]
    assert rows.passes < 10


def test_where_every_request_is_in_time_the_error_is_not_zero(monkeypatch):
    traffic = block().traffic
    results = [MET] * len(traffic.rows)
    check = SelfCheck([], [], results, {("interactive", "generate"): 0.02, ("batch", "generate"): 0.0})
    batch, interactive = predicted(traffic, check, monkeypatch, results).classes
    assert interactive.requests == 40
    assert (interactive.measured, interactive.predicted, interactive.high) == (1.0, 1.0, 1.0)
    sampling = paired_error([0] * 40)
    assert interactive.error == pytest.approx(hypot(sampling, 0.02))
    assert interactive.low == pytest.approx(1 - interactive.error)
    assert batch.error == pytest.approx(paired_error([0] * 20))


def test_a_class_without_requests_in_the_judged_half_is_not_known(monkeypatch):
    traffic = block().traffic
    results = [MET] * len(traffic.rows)
    found = predicted(traffic, SelfCheck([], [], results), monkeypatch, results)
    assert [(each.error, each.low, each.high) for each in found.classes] == [(1.0, 0.0, 1.0)] * 2


def test_what_a_slower_device_changes_of_the_difference_is_part_of_the_error(monkeypatch):
    traffic = block().traffic
    met, count = [MET] * len(traffic.rows), len(traffic.rows)
    check = SelfCheck([], [], met, {(name, "generate"): 0.0 for name in ("interactive", "batch")})
    late = [LATE] * count
    both = predicted(traffic, check, monkeypatch, met, slow_before=late, slow_after=late)
    assert [each.error_parts.device for each in both.classes] == [0.0, 0.0]
    one = predicted(traffic, check, monkeypatch, met, slow_before=met, slow_after=late)
    assert [(each.predicted, each.error_parts.device, each.error) for each in one.classes] == [(1, 1, 1)] * 2


def test_requests_that_were_not_served_are_drawn_again(monkeypatch):
    traffic = block().traffic
    rows = [{**row, "outcome": "rejected"} if at < 6 else row for at, row in enumerate(traffic.rows)]
    traffic = replace(traffic, rows=rows)
    met = [MET] * len(rows)
    check = SelfCheck([], [], met, {(name, "generate"): 0.0 for name in ("interactive", "batch")})
    draws = {0: met, 1: [LATE] * 6 + met[6:]}
    monkeypatch.setattr(
        what_if, "replayed_results", lambda traffic, sections, machine=None, seed=0: draws[seed]
    )
    batch, interactive = what_if.predict(traffic, check, OTHER, note=lambda text: None).classes
    assert (interactive.imputed, batch.imputed) == (0.1, 0.1)
    assert interactive.error_parts.lengths == pytest.approx(1.96 / 2**0.5 * 4 / 40)
    assert batch.error_parts.lengths == pytest.approx(1.96 / 2**0.5 * 2 / 20)
