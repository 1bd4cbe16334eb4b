"""Requests that retry after their Retry-After are admitted, although bursts continue."""

from benchmark_control_plane.experiments.gate.retry_after_accuracy import returns


def test_nine_of_ten_retries_are_admitted():
    """At twice the rate that the device sustains; below it hardly any request is rejected."""
    found = returns(16.0, seed=2, count=300)
    assert found["turned_away"] > 20
    assert found["then_admitted"] >= 0.9 * found["turned_away"]
    assert 1 < found["median_wait_s"] <= found["longest_wait_s"] < 90
