"""Measures how many of the gate's rejections are right: which share of the rejected would have been late.

    python -m benchmark_control_plane.experiments.gate.rejections configs/bench/memory-pressure.yaml

Runs the simulated systems of kind `tandem` in an experiment file with `admission.explore: 0.1`, so that one
in ten of the requests to be rejected as unattainable is served, and counts by class how many of those are
late. Objectives and capacity are measured as in the experiment itself.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import data_folder_option
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.judge.experiment_file import Experiment, classes_section, merge, read_experiment
from benchmark_control_plane.judge.experiment_schema import SystemSection
from benchmark_control_plane.judge.measurement_stages import (
    objectives_from,
    requests_of,
    saturation,
    staged,
    unloaded,
)
from benchmark_control_plane.judge.open_loop_client import open_loop
from benchmark_control_plane.judge.records import slo_targets
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.systems import Objectives
from benchmark_control_plane.simulator import virtual_time

_EXPLORE = {"admission": {"explore": 0.1}}


@dataclass(slots=True)
class ExploredCounts:
    """Requests that were to be rejected and were served, by outcome."""

    met: int = 0
    late: int = 0
    by_class: dict[str, list[int]] = field(default_factory=dict)

    def add(self, service_class: str, *, is_late: bool) -> None:
        """Counts one request."""
        counted = self.by_class.setdefault(service_class, [0, 0])
        counted[is_late] += 1
        self.met, self.late = self.met + (not is_late), self.late + is_late


def explored(
    experiment: Experiment, system: SystemSection, objectives: Objectives, rate: float, seed: int
) -> ExploredCounts:
    """Runs one system at `rate` requests per second and counts the explored rejections."""
    return virtual_time.run(_explored(experiment, system, objectives, rate, seed))


async def _explored(
    experiment: Experiment, system: SystemSection, objectives: Objectives, rate: float, seed: int
) -> ExploredCounts:
    plan = experiment.plan
    sections = merge({"classes": classes_section(plan, objectives)}, system.simulated or {})
    sections = merge(sections, _EXPLORE)
    requests = requests_of(experiment, system, rate, seed)
    counts = ExploredCounts()
    async with simulated_target(plan.device_of(system), sections, has_gate=True) as target:
        await open_loop(
            target, requests, slo_targets(objectives),
            warmup=plan.window.warmup_s, drain=plan.window.drain_s,
            clock=asyncio.get_running_loop().time, tick=lambda *_: None,
        )  # fmt: skip
        for family in target.service.status.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "tandem_explored_total" and sample.value:
                    is_late = sample.labels["outcome"] != "met"
                    for _ in range(int(sample.value)):
                        counts.add(sample.labels["class"], is_late=is_late)
    return counts


def study(file: Path, data: Path | None, seeds: Sequence[int] | None) -> list[dict[str, Any]]:
    """One row per system and load, over all seeds."""
    experiment = read_experiment(file, data_folder_option(data))
    plan = experiment.plan
    reference = plan.reference_system
    with staged(plan, reference, {}, Path()) as stage:
        objectives = objectives_from(plan, unloaded(experiment, stage, reference))
        capacity = plan.capacity.rps or saturation(experiment, stage, reference)
    rows = []
    for system in plan.systems:
        if system.kind != "tandem" or system.simulated is None:
            continue
        for load in system.loads or plan.loads:
            total = ExploredCounts()
            for seed in seeds or plan.seeds:
                found = explored(experiment, system, objectives, load * capacity, seed)
                for name, (met, late) in found.by_class.items():
                    for is_late in [False] * met + [True] * late:
                        total.add(name, is_late=is_late)
            count = total.met + total.late
            rows.append(
                {
                    "system": system.name, "load": load, "explored": count,
                    "late_share": total.late / count if count else None,
                    "met_and_late_by_class": total.by_class,
                }
            )  # fmt: skip
            print(rows[-1], file=sys.stderr)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the rows."""
    parser = argparse.ArgumentParser(prog="rejections", description=__doc__)
    parser.add_argument("experiment", type=Path, help="experiment file with simulated systems")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace those of the file")
    parser.add_argument("--data", type=Path, help="folder of public data sets")
    add_results(parser)
    options = parser.parse_args(arguments)
    write_or_print(options.results, study(options.experiment, options.data, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
