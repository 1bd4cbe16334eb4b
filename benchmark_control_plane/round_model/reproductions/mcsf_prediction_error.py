"""Mean latency under prediction errors: uniform errors of up to ε, a tenth of the memory kept free.

The paper shows the latencies as a figure without numbers (Figure 5) and states that MC-SF stays below first
come, first served even at ε = 0.8.
"""

import statistics
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
from benchmark_control_plane.round_model.workloads import (
    conversation_lengths,
    mispredicted,
    poisson_arrivals,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "mcsf-prediction-error"
ERRORS = (0.0, 0.2, 0.5, 0.8)
CONTENDERS = (
    PublishedPolicy("MC-SF", "mc-sf", 0.1),
    PublishedPolicy("MC-SF, skipping", "mc-sf-skip", 0.1),
    PublishedPolicy("MC-Benchmark", "mc-benchmark", 0.1),
    PublishedPolicy("FCFS as vLLM", "fcfs"),
    PublishedPolicy("Tandem", "tandem", 0.1),
)


def run(results: Path, *, seed: int = 0, runs: int = 10) -> Mapping[str, Any]:
    rows: list[dict[str, Any]] = []
    for epsilon in ERRORS:
        # The same requests for every ε: only the predictions differ.
        rng = np.random.default_rng(seed)
        means: dict[str, list[float]] = {c.label: [] for c in CONTENDERS}
        clears = dict.fromkeys(means, 0)
        for repeat in range(runs):
            exact = poisson_arrivals(rng, conversation_lengths(rng, 1_000), 50)
            requests = list(mispredicted(np.random.default_rng([seed, repeat]), exact, epsilon))
            for contender in CONTENDERS:
                schedule = latency_run(requests, contender, repeat)
                means[contender.label].append(schedule.mean_latency)
                clears[contender.label] += schedule.totals.clears
        rows.append(
            {
                "epsilon": epsilon,
                "mean_s": {label: statistics.mean(values) for label, values in means.items()},
                "worst_ratio_to_mcsf": {
                    label: max(v / m for v, m in zip(values, means["MC-SF"], strict=True))
                    for label, values in means.items()
                },
                "overflows": clears,
            }
        )
    found = {
        "name": NAME,
        "seed": seed,
        "runs": runs,
        "alpha": 0.1,
        "rows": rows,
        "published": "MC-SF below FCFS at every error, by figure only",
        "differs": SET_UP,
    }
    write_results(results, found)
    _plot(results / f"{NAME}.png", rows)
    print("mean latency in s (overflows in all runs)")
    for row in rows:
        cells = (f"{label} {row['mean_s'][label]:.2f} ({row['overflows'][label]})" for label in row["mean_s"])
        print(f"ε={row['epsilon']:.1f}: " + ", ".join(cells))
    return found


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for contender in CONTENDERS:
        means = [row["mean_s"][contender.label] for row in rows]
        axes.plot([row["epsilon"] for row in rows], means, "o-", label=contender.label)
    axes.set(xlabel="prediction error ε", ylabel="mean latency, s", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
