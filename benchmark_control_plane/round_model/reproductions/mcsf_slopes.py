"""Growth of the mean latency with the number of requests, at 50 and at 10 requests a second.

The published slopes at 50 a second, 1/6 and 1/2, contradict the paper's own table tenfold: 1,000 requests
with means of 32 and 46 seconds imply slopes of at most about 1/30 and 1/20. The slopes at 10 a second are
consistent.
"""

from collections.abc import Mapping
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
from benchmark_control_plane.round_model.workloads import conversation_lengths, poisson_arrivals

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "mcsf-slopes"
COUNTS = (1_000, 2_500, 5_000, 7_500, 10_000)
CONTENDERS = (
    PublishedPolicy("MC-SF", "mc-sf"),
    PublishedPolicy("MC-SF, skipping", "mc-sf-skip"),
    PublishedPolicy("MC-Benchmark", "mc-benchmark"),
    PublishedPolicy("alpha .3", "alpha-protection", 0.3),
    PublishedPolicy("alpha .2 beta .2", "alpha-beta", 0.2, 0.2),
    PublishedPolicy("Tandem", "tandem"),
)
PUBLISHED = {50: {"MC-SF": 1 / 6, "best benchmark": 1 / 2}, 10: {"MC-SF": 1 / 800, "best benchmark": 1 / 100}}


def run(results: Path, *, seed: int = 0) -> Mapping[str, Any]:
    rates: list[dict[str, Any]] = []
    for rate in PUBLISHED:
        rng = np.random.default_rng(seed)
        requests = poisson_arrivals(rng, conversation_lengths(rng, max(COUNTS)), rate)
        means = {
            c.label: [latency_run(requests[:count], c, seed).mean_latency for count in COUNTS]
            for c in CONTENDERS
        }
        slopes = {label: float(np.polyfit(COUNTS, values, 1)[0]) for label, values in means.items()}
        rates.append(
            {"rate": rate, "mean_s": means, "seconds_per_request": slopes, "published": PUBLISHED[rate]}
        )
    found = {"name": NAME, "seed": seed, "counts": COUNTS, "rates": rates, "differs": SET_UP}
    write_results(results, found)
    _plot(results / f"{NAME}.png", rates)
    for row in rates:
        published = ", ".join(f"{name} 1/{1 / slope:.0f}" for name, slope in row["published"].items())
        ours = ", ".join(f"{name} 1/{1 / slope:.0f}" for name, slope in row["seconds_per_request"].items())
        print(f"{row['rate']} a second: published {published}; ours {ours}")
    return found


def _plot(path: Path, rates: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(1, len(rates), figsize=(9, 3.6), layout="constrained")
    for panel, row in zip(axes, rates, strict=True):
        for label, values in row["mean_s"].items():
            panel.plot(COUNTS, values, "o-", label=label)
        panel.set(xlabel="requests", ylabel="mean latency, s", title=f"{row['rate']} a second")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
