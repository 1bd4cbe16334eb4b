"""Gradient-boosted oblivious trees that shift all quantiles of a distribution, one vector of shifts per leaf.

All nodes of one depth share a split, so a tree is `depth` comparisons and a table of 2^depth leaves. Two of
three trees are grown on the gradient common to all quantiles, the third on the gradient of their spread. Each
leaf then moves towards the quantiles of its residuals.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats

_BINS = 32
_PRIOR_ROWS = 60.0
_ROWS_A_TREE = 0.7
_LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Trees:
    """A fitted ensemble: `features` and `thresholds` [trees, depth], `leaves` [trees, 2^depth, levels]."""

    features: npt.NDArray[np.int16]
    thresholds: npt.NDArray[np.float32]
    leaves: npt.NDArray[np.float32]

    def predict(self, row: Floats) -> Floats:
        """Shift of each quantile for one row of features, [levels]."""
        # Training rows hold single precision, and a split is often a value that many of them have.
        bits = row.astype(np.float32)[self.features] > self.thresholds
        leaf = bits @ (1 << np.arange(bits.shape[1]))
        found: Floats = self.leaves[np.arange(len(leaf)), leaf].sum(0, dtype=float)
        return found


def fit_trees(
    rows: Floats,
    target: Floats,
    start: Floats,
    levels: Floats,
    *,
    trees: int = 80,
    depth: int = 4,
) -> Trees:
    """Boosts trees from initial quantiles.

    Args:
        rows: features, [rows, features].
        target: observed values, [rows].
        start: initial quantiles, [rows, levels].
        levels: quantile levels, [levels].
        trees: number of trees.
        depth: splits per tree.
    """
    rng = np.random.default_rng(0)
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1])) for column in rows.T]
    cuts = np.array([len(e) for e in edges])
    binned = np.stack([np.searchsorted(e, column) for e, column in zip(edges, rows.T, strict=True)], 1)
    now = start.copy()
    whole, spread = np.ones(len(levels)), np.sign(levels - 0.5)
    features = np.zeros((trees, depth), np.int16)
    thresholds = np.zeros((trees, depth), np.float32)
    leaves = np.zeros((trees, 1 << depth, len(levels)), np.float32)
    for at in range(trees):
        gradient = (levels - (target[:, None] < now)) @ (spread if at % 3 == 2 else whole)
        some = np.flatnonzero(rng.random(len(rows)) < _ROWS_A_TREE)
        leaf = np.zeros(len(rows), int)
        for level in range(depth):
            feature, cut = _best_cut(binned[some], leaf[some], gradient[some], cuts, 1 << level, rng)
            features[at, level] = feature
            thresholds[at, level] = edges[feature][cut]
            leaf += (binned[:, feature] > cut).astype(int) << level
        for index in range(1 << depth):
            inside = leaf == index
            own = some[inside[some]]
            if len(own):
                step = _quantiles(target[own, None] - now[own], levels)
                leaves[at, index] = _LEARNING_RATE * step * len(own) / (len(own) + _PRIOR_ROWS)
                now[inside] += leaves[at, index]
    return Trees(features, thresholds, leaves)


def _best_cut(
    binned: npt.NDArray[np.int64],
    leaf: npt.NDArray[np.int64],
    gradient: Floats,
    cuts: npt.NDArray[np.int64],
    leaves: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Best split (feature, last bin on the left) of all leaves, from a random half of the features."""
    varying = np.flatnonzero(cuts)
    best, found = -1.0, (int(varying[0]), 0)
    for feature in rng.permutation(varying)[: (len(varying) + 1) // 2]:
        place = leaf * _BINS + binned[:, feature]
        size = leaves * _BINS
        left = np.bincount(place, gradient, size).reshape(leaves, _BINS).cumsum(1)
        count = np.bincount(place, minlength=size).reshape(leaves, _BINS).cumsum(1)
        right, others = left[:, -1:] - left, count[:, -1:] - count
        gain = (left**2 / (count + _PRIOR_ROWS) + right**2 / (others + _PRIOR_ROWS)).sum(0)
        cut = int(gain[: cuts[feature]].argmax())
        if gain[cut] > best:
            best, found = float(gain[cut]), (int(feature), cut)
    return found


def _quantiles(residuals: Floats, levels: Floats) -> Floats:
    """Empirical quantile of each column of residuals [rows, levels] at its own level."""
    ordered = np.sort(residuals, axis=0)
    place = np.clip(np.rint(levels * (len(ordered) + 1) - 1), 0, len(ordered) - 1).astype(int)
    found: Floats = ordered[place, np.arange(len(levels))]
    return found
