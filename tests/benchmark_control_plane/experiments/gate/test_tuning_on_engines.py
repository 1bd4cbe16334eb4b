"""The table of a tuned configuration: before, predicted and after."""

from benchmark_control_plane.decision_replay.prediction_error import ErrorParts
from benchmark_control_plane.decision_replay.replayed_requests import Summary
from benchmark_control_plane.decision_replay.what_if import ClassChange
from benchmark_control_plane.experiments.gate.tuning_on_engines import table
from benchmark_control_plane.experiments.results_page import result_rows


def change(group, requests, measured, predicted, error):
    return ClassChange(
        group, requests, measured, predicted, error, predicted - error, predicted + error,
        ErrorParts(error, 0, 0, 0), 0, 0, 0, 0, 0, None,
    )  # fmt: skip


def test_all_requests_are_weighted_by_those_of_each_run():
    chat, documents = ("interactive", "generate"), ("documents", "embed")
    predicted = [change(chat, 300, 0.5, 0.9, 0.02), change(documents, 100, 0.9, 1.0, 0.06)]
    after = {chat: Summary(200, 200, 0.8, 0, None, None), documents: Summary(200, 200, 1.0, 0, None, None)}
    rows = table(predicted, after)
    assert [row["class"] for row in rows] == ["interactive", "documents", "all"]
    assert rows[0] == {
        "class": "interactive", "requests": 300, "before": 50.0, "predicted": 90.0, "error": 2.0,
        "requests_after": 200, "after": 80.0,
    }  # fmt: skip
    assert rows[-1] == {
        "class": "all", "requests": 400, "before": 60.0, "predicted": 92.5, "error": 3.0,
        "requests_after": 400, "after": 90.0,
    }  # fmt: skip
    [(_, result)] = result_rows.tuning_on_engines({"mix": "memory", "seconds": 600.0, "classes": rows})
    assert result.endswith("<br>all: 60.0 %, 92.5 ± 3.0 %, 90.0 %")
