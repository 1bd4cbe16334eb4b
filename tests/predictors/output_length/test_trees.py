import numpy as np
import pytest

from predictors.output_length.trees import fit_trees

LEVELS = np.array([0.1, 0.5, 0.9])


def test_location_and_spread_follow_their_features():
    """y = x0 + (1 + 3 x1) * noise, noise standard normal: quantiles are known."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(0, 2, 4_000), rng.integers(0, 2, 4_000), rng.normal(size=4_000)])
    target = 4.0 * rows[:, 0] + (1 + 3 * rows[:, 1]) * rng.normal(size=4_000)
    start = np.tile(np.quantile(target, LEVELS), (4_000, 1))
    trees = fit_trees(rows, target, start, LEVELS)
    for x0, x1 in ((0, 0), (1, 0), (0, 1), (1, 1)):
        found = start[0] + trees.predict(np.array([x0, x1, 0.0]))
        wanted = 4 * x0 + (1 + 3 * x1) * np.array([-1.2816, 0.0, 1.2816])
        assert found == pytest.approx(wanted, abs=0.25 * (1 + 3 * x1))


def test_constant_feature_is_never_split():
    rows, target = np.ones((100, 1)), np.arange(100.0)
    start = np.tile(np.quantile(target, LEVELS), (100, 1))
    assert np.abs(fit_trees(rows, target, start, LEVELS, trees=10).predict(np.ones(1))).max() < 2.0


def test_a_value_on_a_split_takes_the_side_that_it_took_in_training():
    """Training rows are stored in single precision, which rounds log1p(256) down; requests are not."""
    short, long = np.log1p([256.0, 1_024.0])
    rows = np.repeat([short, long], 200).astype(np.float32).astype(float)[:, None]
    target = np.repeat([0.0, 8.0], 200)
    start = np.tile(np.quantile(target, LEVELS), (400, 1))
    trees = fit_trees(rows, target, start, LEVELS)
    assert trees.predict(np.array([short])).tolist() == trees.predict(rows[0]).tolist()
    assert trees.predict(np.array([long]))[1] > trees.predict(np.array([short]))[1] + 4.0


def test_splits_lie_between_the_values_of_a_feature():
    """A split beyond the last value would separate nothing."""
    rng = np.random.default_rng(3)
    rows = np.column_stack([rng.integers(0, n, 500) for n in (2, 3, 4)]).astype(float)
    rows[:480, 1] = 0.0
    target = rng.normal(size=500)
    trees = fit_trees(rows, target, np.tile(np.quantile(target, LEVELS), (500, 1)), LEVELS, depth=5)
    assert (trees.thresholds <= rows.max(0)[trees.features]).all()
