"""Measures which requests should be preempted: rules for victims under equal arrivals.

    python -m benchmark_control_plane.experiments.gate.victims configs/bench/eviction.yaml [--results FILE]

Each rule ranks the running requests of one priority, in the engine (`edf`) or, with vLLM's own scheduler, at
the gate; lower priorities always go first. Simulated; ten minutes. Prints the promises kept in percent.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, cast
from zlib import crc32

from benchmark_control_plane.common.command_line import data_folder_option
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.measurement_stages import Bench, objectives_from, staged, unloaded
from benchmark_control_plane.judge.system_schema import SystemSection
from controlplane.core.clock import milliseconds
from controlplane.core.pool_view import Running
from controlplane.policy.gate.preemption import VictimRank, latest_started
from controlplane.policy.registry import VICTIMS

_TAU = milliseconds(100)


def cost(running: Running, *, recompute: bool = True, slack: bool = True) -> float:
    """The former rule: lost work and urgency per byte, more for requests that were preempted before."""
    urgency = 0.0
    if slack and running.slack is not None and running.slack >= 0:
        urgency = (1 + running.priority) * _TAU * _TAU / (running.slack + _TAU)
    lost = running.recompute if recompute else 0
    return (lost + urgency) * (1 + running.preemptions) / max(1, running.freed_bytes)


def random(running: Running) -> float:
    """The same for every rule before and after it, and new with every token."""
    return crc32(f"{running.request_id} {running.progress.output_tokens}".encode())


def least_recently_used(running: Running) -> float:
    """The oldest last token first; a request without one was just started."""
    last = running.progress.last_token
    return float("inf") if last is None else last


ENGINE_ARMS: dict[str, VictimRank] = {
    "latest-started": latest_started,
    "random": random,
    "least-recently-used": least_recently_used,
    "most-recompute": lambda running: -running.recompute,
    "least-recompute": lambda running: running.recompute,
    "cost": cost,
    "cost-without-recompute": lambda running: cost(running, recompute=False),
    "cost-without-slack": lambda running: cost(running, slack=False),
}
GATE_ARMS = ("latest-started", "random", "most-recompute", "cost")


def systems() -> list[SystemSection]:
    """One system for each arm."""
    places: list[tuple[str, Any, Sequence[str]]] = [
        ("engine", {}, list(ENGINE_ARMS)),
        ("gate", "off", GATE_ARMS),
    ]
    return [
        SystemSection(
            name=f"{place}: {arm}",
            kind="ablation",
            simulated={"scheduling": {"engine": engine, "victims": arm}},
        )
        for place, engine, arms in places
        for arm in arms
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per run, then the mean of each arm, overall and by class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="replaces the seeds of the experiment")
    add_results(parser)
    options = parser.parse_args(arguments)
    cast(dict[str, VictimRank], VICTIMS).update(ENGINE_ARMS)
    experiment = read_experiment(options.experiment, data_folder_option(None))
    plan, reference = experiment.plan, experiment.plan.reference_system
    assert plan.capacity.rps is not None, "the experiment states the capacity"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with staged(plan, reference, {}, folder) as stage:
            objectives = objectives_from(plan, unloaded(experiment, stage, reference))
        bench = Bench(experiment, objectives, plan.capacity.rps)
        for seed, system in product(options.seeds or plan.seeds, systems()):
            with staged(plan, system, objectives, folder) as stage:
                entry, _ = bench.run(stage, system, plan.loads[0], seed, lambda *_: None)
            kept, preemptions = entry["attainment"], entry["engine"]["preemptions"]
            runs.append({"arm": system.name, "seed": seed, "kept": kept, "preemptions": preemptions})
            print(f"{system.name:32} seed {seed}  {100 * kept['overall']:5.1f}", flush=True)
    for system in systems():
        found = [run["kept"] for run in runs if run["arm"] == system.name]
        means = {key: 100 * mean(kept[key] for kept in found) for key in found[0]}
        print(f"{system.name:32}" + "  ".join(f"{key} {value:5.1f}" for key, value in means.items()))
    write_or_print(options.results, {"runs": runs})


if __name__ == "__main__":
    main()
