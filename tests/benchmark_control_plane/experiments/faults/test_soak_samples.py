"""What a process keeps over an hour: the least of each window, and the slope of these."""

import pytest

from benchmark_control_plane.experiments.faults.soak import Samples


def sampled(minutes: int, *, grows: float, passes: float = 200.0) -> Samples:
    """Samples every six seconds of a worker that keeps `grows` MB an hour, beside what its passes take."""
    samples = Samples()
    for number in range(10 * minutes):
        samples.minutes.append(number / 10)
        taken = passes * (number % 7) / 7
        samples.memory["worker"].append(600.0 + grows * number / 600 + taken)
    return samples


@pytest.mark.parametrize("grows", [0.0, 12.0])
def test_what_passes_take_is_not_kept(grows: float):
    assert sampled(60, grows=grows).slope("worker", settle=10.0) == pytest.approx(grows, abs=0.3)


def test_growth_before_the_process_has_settled_does_not_count():
    samples = sampled(60, grows=0.0)
    samples.memory["worker"][:100] = [100.0] * 100
    assert samples.slope("worker", settle=10.0) == pytest.approx(0.0, abs=0.1)
    assert samples.slope("worker", settle=0.0) > 100.0


def test_a_window_that_has_only_begun_does_not_count():
    assert list(sampled(60, grows=0.0).kept("worker")) == [5.0 * window for window in range(12)]
    assert list(sampled(12, grows=0.0).kept("worker")) == [0.0, 5.0]
