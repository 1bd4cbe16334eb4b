"""Greedy allocation of memory to requests over several cache tiers (Apt-Serve, with a correction).

A request may hold its tokens in one of several tiers, each with a size and a value (hidden states are
smaller, but every iteration recomputes keys and values). The greedy gives memory where a cell gains most, one
step up a request's hull at a time, until a step does not fit; the alternative is that request alone in its
best tier. The better of both is at least half the optimum (Apt-Serve, theorem 1; its printed pseudocode may
exceed the memory, this does not).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TierOffers:
    """Sizes and values of every request in every tier.

    Request i in tier t + 1 takes `shares[t, i] * cells[i]` cells, rising with t, and is worth `weights[i] *
    (pending[i] - penalties[t, i] * cells[i])`. A share of NaN excludes the tier. `shares` and `penalties` are
    float64 [tiers, n], the others float64 [n].

    Shares and penalties are per cell, so that requests with equal gain per step tie exactly.
    """

    pending: Floats
    cells: Floats
    shares: Floats
    penalties: Floats
    weights: Floats

    def sizes(self) -> Floats:
        """Cells, float64 [tiers, n]."""
        return self.shares * self.cells

    def values(self) -> Floats:
        """Values in seconds, float64 [tiers, n]."""
        return self.weights * (self.pending - self.penalties * self.cells)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """`tiers[i]` is the tier of request i, counted from 1; 0 holds nothing."""

    tiers: Ints
    value: float
    size: float


def hybrid_offers(
    pending: Floats,
    cells: Floats,
    *,
    ratio: float,
    cell_penalty: float | Floats,
    whole_blocks: bool = False,
) -> TierOffers:
    """Offers of two tiers: 1 is hidden states, `ratio` times the size of tier 2, keys and values.

    `pending` is seconds since arrival, or since the last token. `cell_penalty` is the cost in seconds of one
    hidden cell to all requests: number of requests x seconds per cell x iterations that it is expected to
    stay. With a ratio of 1 or more hidden states save nothing and are excluded.
    """
    everything = np.ones(len(cells))
    hidden = np.ceil(ratio * cells) / cells if whole_blocks else np.full(len(cells), ratio)
    return TierOffers(
        pending,
        cells,
        shares=np.stack([np.where(hidden < 1, hidden, np.nan), everything]),
        penalties=np.stack([everything * cell_penalty, np.zeros(len(cells))]),
        weights=everything,
    )


def plan_tiers(offers: TierOffers, capacity: float) -> TierPlan:
    """The better of the greedy and of its first misfit alone.

    Ties go to the lower index, then the lower tier: pass requests in order of their ids. Upgrades under one
    penalty always tie.
    """
    depth, count = offers.shares.shape
    sizes, values = offers.sizes(), offers.values()
    possible = sizes <= capacity
    gains, reached, added = _hull_steps(offers, sizes, values, possible)
    # Request-major order, so that a stable sort breaks ties by request, then by step.
    offered = np.flatnonzero(gains >= 0)
    ranked = offered[np.argsort(-gains[offered], kind="stable")]
    used = np.cumsum(added[ranked])
    fitting = int(np.searchsorted(used, capacity, side="right"))

    tiers = np.zeros(count, np.intp)
    # Of a request's steps the last one taken stays: assignment by index keeps the last value.
    tiers[ranked[:fitting] // depth] = reached[ranked[:fitting]]
    held = np.flatnonzero(tiers)
    value = float(values[tiers[held] - 1, held].sum())
    if fitting < len(ranked):
        misfit = int(ranked[fitting]) // depth
        alone = np.where(possible[:, misfit], values[:, misfit], -np.inf)
        best = int(alone.argmax())
        if alone[best] > value:
            tiers = np.zeros(count, np.intp)
            tiers[misfit] = best + 1
            return TierPlan(tiers, float(alone[best]), float(sizes[best, misfit]))
    return TierPlan(tiers, value, float(used[fitting - 1]) if fitting else 0.0)


def _hull_steps(
    offers: TierOffers, sizes: Floats, values: Floats, possible: Bools
) -> tuple[Floats, Ints, Floats]:
    """Steps up the concave hull of each request's (size, value) points, starting from nothing.

    Returns:
        Gain per cell, tier reached, and cells added: flat, request-major, one entry per tier; the gain is
        negative where there is no step.
    """
    depth, count = sizes.shape
    columns = np.arange(count)
    gains = np.full((count, depth), -np.inf)
    reached = np.zeros((count, depth), np.intp)
    added = np.zeros((count, depth))
    slopes = np.full((depth, count), -np.inf)
    np.divide(values, sizes, out=slopes, where=possible)
    steepest = np.full(count, np.inf)
    size = np.zeros(count)
    best = slopes.argmax(axis=0)
    for step in range(depth):
        if step:
            slopes = _slopes_onward(offers, best, possible)
            best = slopes.argmax(axis=0)
        # Hull slopes fall from step to step; rounding must not lift one above its predecessor.
        steepest = np.minimum(steepest, slopes[best, columns])
        gains[:, step] = steepest
        reached[:, step] = best + 1
        added[:, step] = sizes[best, columns] - size
        size = sizes[best, columns]
    return gains.ravel(), reached.ravel(), added.ravel()


def _slopes_onward(offers: TierOffers, held: Ints, possible: Bools) -> Floats:
    """Gain per cell of moving each request from row `held` to every other, -inf where none is larger."""
    columns = np.arange(len(held))
    further = offers.shares - offers.shares[held, columns]
    saved = offers.weights * (offers.penalties[held, columns] - offers.penalties)
    slopes = np.full(further.shape, -np.inf)
    np.divide(saved, further, out=slopes, where=possible & (further > 0))
    return slopes
