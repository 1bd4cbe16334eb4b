"""Throughput with the decision log: ratios of pairs of windows, and what is quoted of them."""

from benchmark_control_plane.experiments.gate.decision_log_throughput import ratios
from benchmark_control_plane.experiments.results_page import result_rows


def test_ratios_are_taken_within_pairs_and_quoted():
    # The machine slows down by half; the log costs 1 and 3 % of the two pairs.
    found = ratios(plain=[(1_000.0, 1_000.0), (500.0, 2_000.0)], logged=[(990.0, 1_010.0), (485.0, 2_050.0)])
    assert found["throughput_ratio"] == {"min": 0.97, "p25": 0.975, "median": 0.98, "p75": 0.985, "max": 0.99}
    assert found["added_us"]["median"] == 30.0
    [(question, result)] = result_rows.decision_log_throughput(
        {"rounds": 2, "seconds": 4.0, "by_tokens": {"16": found}}
    )
    assert "2 pairs of windows of 4 s" in question
    assert result == "16 tokens: 0.980 (0.970 to 0.990), +30 µs of 1.5 ms"
