"""Cost of the hybrid-cache greedy and its distance from the best plan, with Apt-Serve's published cost.

The published cost (its table of scheduling overheads) is from another machine, so only the growth compares.
Quality is measured on small random instances against brute force, and on large ones against the LP
relaxation, which no plan exceeds: the greedy up to its first misfit, plus a fraction of that step.
"""

import statistics
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmark_control_plane.round_model.reproductions.conversation import write_results
from controlplane.core.memory_ledger import Floats
from controlplane.policy.cache_tiers.allocation import TierOffers, hybrid_offers, plan_tiers

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "apt-greedy"
PUBLISHED_MS: Mapping[int, float] = {50: 0.3, 100: 0.5, 200: 1.0, 400: 2.1, 800: 4.8, 1600: 10.8}

_REPEATS = 200
_SMALL_INSTANCES, _SMALL_MOST = 2_000, 6
_LARGE_INSTANCES = 50
_SECONDS_PER_CELL = 2e-6
"""Penalty per cell; chosen so that plans go from all hidden states to none within the published counts."""


def run(results: Path, *, seed: int = 0) -> dict[str, Any]:
    """Prints the tables and writes `apt-greedy.json` and `apt-greedy.png` into `results`."""
    draw = np.random.default_rng(seed)
    cost = [_cost(draw, count) for count in PUBLISHED_MS]
    quality = [_relaxed_quality(draw, count) for count in PUBLISHED_MS]
    found = {
        "name": NAME,
        "seed": seed,
        "cost": cost,
        "against_relaxation": quality,
        "against_brute_force": _brute_quality(draw),
        "differs": "published cost: Python on the authors' server; ours: numpy on this machine, one thread",
    }
    write_results(results, found)
    _plot(results / f"{NAME}.png", cost, quality)
    _print(found)
    return found


def _candidates(draw: np.random.Generator, count: int) -> tuple[TierOffers, float]:
    """Draws pending seconds and cells like ShareGPT's under load, and memory for about 40 % of them."""
    pending = draw.exponential(2.0, count)
    cells = np.minimum(2_048, np.ceil(draw.lognormal(5.3, 1.0, count)))
    offers = hybrid_offers(pending, cells, ratio=0.5, cell_penalty=_SECONDS_PER_CELL * count)
    return offers, float(np.ceil(0.4 * cells.sum()))


def _cost(draw: np.random.Generator, count: int) -> dict[str, float]:
    durations = []
    for _ in range(_REPEATS):
        pending = draw.exponential(2.0, count)
        cells = np.minimum(2_048, np.ceil(draw.lognormal(5.3, 1.0, count)))
        capacity = 0.4 * float(cells.sum())
        started_at = time.perf_counter()
        plan_tiers(hybrid_offers(pending, cells, ratio=0.5, cell_penalty=_SECONDS_PER_CELL * count), capacity)
        durations.append(1_000 * (time.perf_counter() - started_at))
    quantiles = statistics.quantiles(durations, n=20)
    return {
        "candidates": count,
        "published_ms": PUBLISHED_MS[count],
        "median_ms": statistics.median(durations),
        "p95_ms": quantiles[18],
    }


def _relaxed_quality(draw: np.random.Generator, count: int) -> dict[str, float]:
    ratios, hidden = [], []
    for _ in range(_LARGE_INSTANCES):
        offers, capacity = _candidates(draw, count)
        plan = plan_tiers(offers, capacity)
        ratios.append(plan.value / _relaxation(offers, capacity))
        hidden.append(float((plan.tiers == 1).sum() / max(1, (plan.tiers > 0).sum())))
    return {
        "candidates": count,
        "mean_ratio": statistics.mean(ratios),
        "worst_ratio": min(ratios),
        "hidden_share": statistics.mean(hidden),
    }


def _relaxation(offers: TierOffers, capacity: float) -> float:
    """Upper bound for two tiers: memory filled by gain per cell, the last step in part.

    Written independently of the policy, so that an error there would show.
    """
    steps: list[tuple[float, float]] = []
    for p, m, rate in zip(offers.pending, offers.cells, offers.penalties[0], strict=True):
        half, loss = m / 2, rate * m
        if loss <= p / 2:
            steps += [((p - loss) / half, half), (loss / half, half)]
        else:
            steps.append((p / m, m))
    value, left = 0.0, capacity
    for gain, size in sorted(steps, reverse=True):
        value += gain * min(size, left)
        left -= min(size, left)
    return value


def _brute_quality(draw: np.random.Generator) -> dict[str, float]:
    ratios = []
    for _ in range(_SMALL_INSTANCES):
        count = int(draw.integers(1, _SMALL_MOST + 1))
        pending = np.round(draw.exponential(1.0, count), 2) + 0.01
        cells = draw.integers(1, 41, count).astype(float)
        penalty = float(draw.uniform(0, 0.02))
        capacity = float(draw.integers(5, 101))
        offers = hybrid_offers(pending, cells, ratio=0.5, cell_penalty=penalty)
        best = _best_value(offers, capacity)
        if best > 0:
            ratios.append(plan_tiers(offers, capacity).value / best)
    optimal = sum(ratio > 1 - 1e-9 for ratio in ratios)
    return {
        "instances": len(ratios),
        "mean_ratio": statistics.mean(ratios),
        "worst_ratio": min(ratios),
        "share_optimal": optimal / len(ratios),
        "guaranteed": 0.5,
    }


def _best_value(offers: TierOffers, capacity: float) -> float:
    sizes, values = offers.sizes(), offers.values()
    count = sizes.shape[1]
    with_none: Floats = np.concatenate([np.zeros((1, count)), sizes])
    worth: Floats = np.concatenate([np.zeros((1, count)), values])
    choices = np.array(list(product(range(len(with_none)), repeat=count)))
    columns = np.arange(count)
    fits = with_none[choices, columns].sum(axis=1) <= capacity
    return float(worth[choices, columns].sum(axis=1)[fits].max())


def _plot(path: Path, cost: list[dict[str, float]], quality: list[dict[str, float]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    counts = [row["candidates"] for row in cost]
    left.loglog(counts, [row["published_ms"] for row in cost], "s--", label="Apt-Serve, published")
    left.loglog(counts, [row["median_ms"] for row in cost], "o-", label="ours, median")
    left.loglog(counts, [row["p95_ms"] for row in cost], "o:", label="ours, 95th percentile")
    left.set(xlabel="candidates", ylabel="milliseconds a plan", title="Cost")
    left.legend()
    right.semilogx(counts, [row["mean_ratio"] for row in quality], "o-", label="mean")
    right.semilogx(counts, [row["worst_ratio"] for row in quality], "o:", label="worst of 50")
    right.set(xlabel="candidates", ylabel="value / upper bound", title="Quality")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _print(found: Mapping[str, Any]) -> None:
    print("candidates  published ms  ours ms  p95 ms  value/bound  worst  hidden")
    for cost, quality in zip(found["cost"], found["against_relaxation"], strict=True):
        print(
            f"{cost['candidates']:10d}  {cost['published_ms']:12.1f}  {cost['median_ms']:7.3f}"
            f"  {cost['p95_ms']:6.3f}  {quality['mean_ratio']:11.4f}  {quality['worst_ratio']:.4f}"
            f"  {quality['hidden_share']:6.2f}"
        )
    brute = found["against_brute_force"]
    print(
        f"against brute force on {brute['instances']} small instances: mean {brute['mean_ratio']:.4f}, "
        f"worst {brute['worst_ratio']:.4f} (guaranteed 0.5), optimal in {brute['share_optimal']:.1%}"
    )
