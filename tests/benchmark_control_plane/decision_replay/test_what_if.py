"""What a prediction says of each class, from replays that no simulation was needed for."""

from dataclasses import replace

from benchmark_control_plane.decision_replay import what_if
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


def predicted(traffic, check, after, monkeypatch):
    """The prediction of a configuration that every replay ends in `after`."""
    monkeypatch.setattr(what_if, "replayed_results", lambda *args, **more: after)
    return what_if.predict(traffic, check, {}, note=lambda text: None)


def test_the_rows_are_read_a_few_times_and_not_once_for_each_request(monkeypatch):
    traffic = block().traffic
    rows = CountedRows(traffic.rows)
    results = [MET] * len(rows)
    found = predicted(replace(traffic, rows=rows), SelfCheck([], [], results), results, monkeypatch)
    assert [each.imputed for each in found.classes] == [0.0, 0.0]
    assert rows.passes < 10
