"""Requests that retry after their Retry-After are admitted, although bursts continue."""

import pytest

from benchmark_control_plane.experiments.gate.retry_after_accuracy import returns


@pytest.mark.long
def test_nine_of_ten_retries_are_admitted():
    """At 1.5 times the rate that the device sustains; at that rate hardly any request is rejected."""
    runs = [returns(12.0, seed, count=400) for seed in (1, 2, 3)]
    rejected = sum(run["turned_away"] for run in runs)
    assert rejected > 40
    assert sum(run["then_admitted"] for run in runs) >= 0.9 * rejected
    for run in runs:
        assert 1 < run["median_wait_s"] < 10 and run["longest_wait_s"] < 180
