"""Ratio of total latency to the best known schedule, on 60 instances of the MC-SF paper's models 1 and 2.

No solver that we tried proves an optimum at these sizes. The ratios are to the best schedule known, from
annealing and from the policies themselves, so they are lower bounds of the true ones.
"""

import statistics
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from benchmark_control_plane.round_model import instance as hindsight
from benchmark_control_plane.round_model.optimum_search import initial_orders, search
from benchmark_control_plane.round_model.reproductions.conversation import write_results
from benchmark_control_plane.round_model.schedules import PolicySetting, run_policy
from benchmark_control_plane.round_model.workloads import RoundInstance, model_one, model_two

mpl.use("Agg")
from matplotlib import pyplot as plt

NAME = "mcsf-synthetic"
POLICIES = ("mc-sf", "mc-sf-skip", "mc-benchmark", "tandem")
PUBLISHED = {
    "all at once": {"mean": 1.005, "worst": 1.074},
    "Poisson": {"mean": 1.047, "worst": 1.227},
}
_MODELS: Mapping[str, Callable[[np.random.Generator], RoundInstance]] = {
    "all at once": model_one,
    "Poisson": model_two,
}
_SEARCH_CHECKS = 150
"""Annealing checks per instance, of 64 moves each; a count instead of a time, so that results repeat."""


def run(results: Path, *, seed: int = 0, instances: int = 30) -> Mapping[str, Any]:
    rng = np.random.default_rng(seed)
    models = []
    for name, draw in _MODELS.items():
        ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        to_mcsf: list[float] = []
        for _ in range(instances):
            instance = draw(rng)
            totals = {
                policy: run_policy(instance.requests, instance.memory, PolicySetting(policy)).total_latency
                for policy in POLICIES
            }
            best = min(_best_known(instance), *totals.values())
            for policy in POLICIES:
                ratios[policy].append(totals[policy] / best)
            to_mcsf.append(totals["tandem"] / totals["mc-sf"])
        models.append(
            {
                "model": name,
                "to_best_known": {
                    policy: {"mean": statistics.mean(r), "worst": max(r), "equal": sum(x == 1 for x in r)}
                    for policy, r in ratios.items()
                },
                "tandem_to_mcsf": {"mean": statistics.mean(to_mcsf), "worst": max(to_mcsf)},
                "ratios": ratios,
                "published": PUBLISHED[name],
            }
        )
    found = {
        "name": NAME,
        "seed": seed,
        "instances": instances,
        "models": models,
        "differs": "best known by annealing instead of an integer program; published ratios are MC-SF's",
    }
    write_results(results, found)
    _plot(results / f"{NAME}.png", models)
    _print(models)
    return found


def _best_known(instance: RoundInstance) -> float:
    jobs = tuple(
        hindsight.HindsightJob(request.arrival, request.prompt, request.output)
        for request in instance.requests
    )
    problem = hindsight.HindsightInstance(instance.memory, jobs)
    checks = count()
    start = search(problem, initial_orders(problem), seed=0, stop=lambda: next(checks) >= _SEARCH_CHECKS)
    return problem.total_latency(start)


def _plot(path: Path, models: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(1, len(models), figsize=(9, 3.4), layout="constrained")
    for panel, row in zip(axes, models, strict=True):
        shown = ("mc-sf", "tandem")
        panel.hist([row["ratios"][policy] for policy in shown], bins=14, label=list(shown))
        panel.axvline(row["published"]["mean"], ls="--", color="grey", label="MC-SF published, mean")
        panel.set(xlabel="total latency / best known", ylabel="instances", title=row["model"])
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _print(models: list[dict[str, Any]]) -> None:
    for row in models:
        published = row["published"]
        print(f"{row['model']}: published MC-SF mean {published['mean']}, worst {published['worst']}")
        for policy, figures in row["to_best_known"].items():
            print(
                f"  {policy:13s} mean {figures['mean']:.4f}  worst {figures['worst']:.4f}"
                f"  best {figures['equal']}"
            )
        to_mcsf = row["tandem_to_mcsf"]
        print(f"  tandem / mc-sf mean {to_mcsf['mean']:.4f}, worst {to_mcsf['worst']:.4f}")
