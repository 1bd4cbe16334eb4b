"""Ticks of logarithmic axes."""

import pytest

from benchmark_control_plane.report.svg_axes import Scale


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (6.0, 18.0, [6, 8, 10, 12, 14, 16, 18]),
        (1.9, 5.6, [2, 3, 4, 5]),
        (8.0, 150.0, [10, 20, 50, 100]),
        (8.0, 2_000.0, [10, 30, 100, 300, 1_000]),
        (0.5, 4e6, [1, 100, 1e4, 1e6]),
    ],
)
def test_a_log_axis_has_a_few_round_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 100, is_log=True).ticks(6) == pytest.approx(ticks)
