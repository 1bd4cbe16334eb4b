"""Cost of traces and of the access log: what is reported, and quoted from it."""

from benchmark_control_plane.experiments.gate.observation_cost import _report
from benchmark_control_plane.experiments.results_page import result_rows


def test_the_costs_of_the_event_loop_and_of_the_thread_are_added():
    medians = {"plain": [1_000.0, 1_002.0], "access_log": [1_010.0, 1_012.0], "traced": [1_020.0, 1_022.0]}
    report = _report(medians, exports=[180.0], lines=[40.0])
    assert report["throughput_ratio"] == {
        "access_log": round(1_001 / 1_051, 4),
        "traced 0.1": round(1_001 / 1_021, 4),
        "traced 1": round(1_001 / 1_201, 4),
    }
    [(question, result)] = result_rows.observation_cost({"rounds": 2, **report})
    assert "request of 1.0 ms" in question and "2 rounds" in question
    assert result == "trace 200 µs, 0.980 at a share of 10 %; line 50 µs, 0.952"
