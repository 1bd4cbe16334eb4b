"""The empirical quantile of measured values."""

import pytest

from benchmark_control_plane.common.distributions import nearest_rank


@pytest.mark.parametrize(
    ("count", "level", "rank"),
    [
        (100, 0.99, 99),
        (101, 0.99, 100),
        (300, 0.99, 297),
        (4, 0.5, 2),
        (5, 0.5, 3),
        (7, 1.0, 7),
        (1, 0.99, 1),
    ],
)
def test_a_share_of_the_values_does_not_exceed_it(count, level, rank):
    assert nearest_rank([float(value) for value in range(count, 0, -1)], level) == rank
