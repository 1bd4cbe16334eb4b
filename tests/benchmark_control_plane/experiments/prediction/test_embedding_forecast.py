"""Scores of the embedding-load forecasts, by hand and on recorded traces."""

import numpy as np
import pytest

pytest.importorskip("statsmodels", reason="the comparison needs the `bench` extra")

from benchmark_control_plane.common.command_line import BadInput, data_folder
from benchmark_control_plane.experiments.prediction.embedding_forecast import (
    TRACES,
    Own,
    WithErrors,
    _moving_mean,
    methods,
    score,
    series_of,
)


class Constant:
    """Always forecasts the same quantiles."""

    def next_quantiles(self):
        return np.array((10.0, 20.0, 30.0))

    def observe(self, value):
        pass


def test_pinball_and_shares_by_hand():
    found = score(Constant(), np.array([15.0] * 100))
    # 5 above the median; 5 and 15 below the others.
    assert found.pinball == pytest.approx((0.5 * 5 / 15, 0.1 * 5 / 15, 0.01 * 15 / 15))
    assert (found.below, found.within) == ((0, 1, 1), (0, 1, 1))
    assert found.coverage_gap == pytest.approx(0.5)


def test_a_moving_mean_uses_only_the_past():
    assert _moving_mean(np.array([2.0, 4.0, 9.0, 1.0]), 2).tolist() == [0.0, 2.0, 3.0, 6.5]
    assert _moving_mean(np.array([2.0, 4.0]), 1).tolist() == [0.0, 2.0]


@pytest.mark.long
def test_all_contenders_are_scored_on_the_same_seconds():
    series = np.random.default_rng(0).poisson(9, 700).astype(float)
    scores = {name: score(method, series) for name, method in methods(series)}
    # All methods but the last value estimate the mean of a Poisson load, so their scores agree.
    assert scores["tandem"].pinball[0] == pytest.approx(scores["ETS, normal"].pinball[0], rel=0.05)
    assert scores["tandem"].pinball[0] < 0.9 * scores["last value"].pinball[0]
    assert max(found.coverage_gap for found in scores.values()) < 0.05


@pytest.mark.long
@pytest.mark.data
def test_it_beats_last_value_and_moving_mean_on_recorded_bursts():
    try:
        folder = data_folder(None, "traces")
    except BadInput as absent:
        pytest.skip(str(absent))
    series = series_of(folder, TRACES["Azure code"])["requests"]
    own = score(Own(), series)
    assert own.coverage_gap < 0.03
    for length in (1, 10):
        other = score(WithErrors(_moving_mean(series, length)), series)
        assert all(ours < 1.005 * theirs for ours, theirs in zip(own.pinball, other.pinball, strict=True))
