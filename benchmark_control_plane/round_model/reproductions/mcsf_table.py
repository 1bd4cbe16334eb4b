"""Mean latency of 1,000 requests at 50 a second over 50 runs, with the figures of Table 1 of the MC-SF paper.

Once with one fixed request set (the quantiles of the lengths, so no draw is lucky) and fresh arrivals, as the
paper's small deviations suggest, and once with fresh lengths in every run.
"""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmark_control_plane.round_model.reproductions.conversation import (
    SET_UP,
    PublishedPolicy,
    latency_run,
    write_results,
)
from benchmark_control_plane.round_model.workloads import (
    RoundRequest,
    conversation_lengths,
    poisson_arrivals,
    typical_lengths,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "mcsf-table"

CONTENDERS = (
    PublishedPolicy("MC-SF", "mc-sf", published=32.112),
    PublishedPolicy("MC-Benchmark", "mc-benchmark", published=46.472),
    PublishedPolicy("alpha .3", "alpha-protection", 0.3, published=51.933),
    PublishedPolicy("alpha .25", "alpha-protection", 0.25, published=51.046),
    PublishedPolicy("alpha .2 beta .2", "alpha-beta", 0.2, 0.2, published=50.401),
    PublishedPolicy("alpha .2 beta .1", "alpha-beta", 0.2, 0.1, published=50.395),
    PublishedPolicy("alpha .1 beta .2", "alpha-beta", 0.1, 0.2, published=53.393),
    PublishedPolicy("alpha .1 beta .1", "alpha-beta", 0.1, 0.1, published=50.862),
    PublishedPolicy("MC-SF, skipping", "mc-sf-skip"),
    PublishedPolicy("FCFS as vLLM", "fcfs"),
    PublishedPolicy("Tandem", "tandem"),
)

_REQUESTS, _RATE = 1_000, 50.0


def run(results: Path, *, seed: int = 0, runs: int = 50) -> Mapping[str, Any]:
    rng = np.random.default_rng(seed)
    fixed_set = typical_lengths(rng, _REQUESTS)
    found = {
        "name": NAME,
        "seed": seed,
        "runs": runs,
        "fixed_set": _measure(lambda: poisson_arrivals(rng, fixed_set, _RATE), runs),
        "fresh_sets": _measure(
            lambda: poisson_arrivals(rng, conversation_lengths(rng, _REQUESTS), _RATE), runs
        ),
        "differs": SET_UP,
    }
    write_results(results, found)
    _plot(results / f"{NAME}.png", found)
    _print(found)
    return found


def _measure(draw: Callable[[], list[RoundRequest]], runs: int) -> list[dict[str, Any]]:
    means: dict[str, list[float]] = {c.label: [] for c in CONTENDERS}
    for repeat in range(runs):
        requests = draw()
        for contender in CONTENDERS:
            means[contender.label].append(latency_run(requests, contender, repeat).mean_latency)
    base, published_base = statistics.mean(means["MC-SF"]), CONTENDERS[0].published
    return [
        {
            "policy": c.label,
            "mean_s": statistics.mean(means[c.label]),
            "sd_s": statistics.stdev(means[c.label]),
            "ratio": statistics.mean(means[c.label]) / base,
            "published_s": c.published,
            "published_ratio": c.published / published_base if c.published and published_base else None,
        }
        for c in CONTENDERS
    ]


def _plot(path: Path, found: Mapping[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    places = np.arange(len(CONTENDERS))
    published = [row["published_ratio"] or 0.0 for row in found["fixed_set"]]
    axes.bar(places - 0.27, published, 0.26, label="published")
    for shift, key in ((0.0, "fixed_set"), (0.27, "fresh_sets")):
        axes.bar(places + shift, [row["ratio"] for row in found[key]], 0.26, label=key.replace("_", " "))
    axes.set_xticks(places, [c.label for c in CONTENDERS], rotation=30, ha="right")
    axes.set(ylabel="mean latency / MC-SF", title="1,000 requests, 50 a second")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _print(found: Mapping[str, Any]) -> None:
    print(f"{'policy':17s} published s ratio | fixed set s    sd ratio | fresh sets s    sd ratio")
    for fixed, fresh in zip(found["fixed_set"], found["fresh_sets"], strict=True):
        published_cells = " " * 17
        if fixed["published_s"]:
            published_cells = f"{fixed['published_s']:11.2f} {fixed['published_ratio']:5.2f}"
        ours = " | ".join(
            f"{row['mean_s']:11.2f} {row['sd_s']:5.2f} {row['ratio']:5.2f}" for row in (fixed, fresh)
        )
        print(f"{fixed['policy']:17s} {published_cells} | {ours}")
