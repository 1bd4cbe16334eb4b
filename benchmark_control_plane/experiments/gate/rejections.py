"""Measures how many of the gate's rejections are right: which share of the rejected would have been late.

    python -m benchmark_control_plane.experiments.gate.rejections configs/bench/memory-pressure.yaml
    python -m benchmark_control_plane.experiments.gate.rejections configs/bench/mix-memory.yaml --loads 1.5

Runs the systems of kind `tandem` in an experiment file, simulated or on real engines, with
`admission.explore: 0.1`, so that one in ten of the requests to be rejected as unattainable is served, and
counts by class how many of those are late. Objectives and capacity are measured as in the experiment itself.
"""

import argparse
import asyncio
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmark_control_plane.common.command_line import add_data, data_folder_option, exit_status
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.judge.experiment_file import Experiment, classes_section, merge, read_experiment
from benchmark_control_plane.judge.measurement_stages import Bench, LiveStage, requests_of, staged
from benchmark_control_plane.judge.open_loop_client import open_loop
from benchmark_control_plane.judge.records import slo_targets
from benchmark_control_plane.judge.reference_system import objectives_from, saturation, unloaded
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.simulator import virtual_time

_EXPLORE = {"admission": {"explore": 0.1}}

Explored = Counter[tuple[str, bool]]
"""Requests that were to be rejected and were served, by class and whether they were late."""


def explored_in(families: Iterable[Metric]) -> Explored:
    """Counts of `tandem_explored_total`."""
    found: Explored = Counter()
    for family in families:
        for sample in family.samples:
            if sample.name == "tandem_explored_total" and sample.value:
                found[sample.labels["class"], sample.labels["outcome"] != "met"] += int(sample.value)
    return found


def simulated(bench: Bench, system: SystemSection, load: float, seeds: Sequence[int]) -> Explored:
    """Counts of a simulated system at one load, over all seeds."""
    return sum((virtual_time.run(_simulated(bench, system, load, seed)) for seed in seeds), Explored())


async def _simulated(bench: Bench, system: SystemSection, load: float, seed: int) -> Explored:
    plan = bench.experiment.plan
    sections = merge({"classes": classes_section(plan, bench.objectives)}, system.simulated or {})
    sections = merge(sections, _EXPLORE)
    requests = requests_of(bench.experiment, system, load * bench.capacity, seed)
    async with simulated_target(plan.device_of(system), sections, has_gate=True) as target:
        await open_loop(
            target, requests, slo_targets(bench.objectives),
            warmup=plan.window.warmup_s, drain=plan.window.drain_s,
            clock=asyncio.get_running_loop().time,
        )  # fmt: skip
        return explored_in(target.service.status.metrics.registry.collect())


def on_real_engines(
    bench: Bench, system: SystemSection, load: float, seeds: Sequence[int], folder: Path
) -> Explored:
    """Counts of a served system at one load, over all seeds and their warm-up."""
    system = replace(system, tandem=merge(system.tandem or {}, _EXPLORE))
    with staged(bench.experiment.plan, system, bench.objectives, folder) as stage:
        assert isinstance(stage, LiveStage)
        assert stage.running_system.metrics is not None
        for seed in seeds:
            bench.run(stage, system, load, seed, lambda *_: None)
            bench.settle(stage, system, load, seed)
        address = stage.running_system.metrics
        with urllib.request.urlopen(f"http://{address.host}:{address.port}/metrics") as page:
            return explored_in(text_string_to_metric_families(page.read().decode()))


def study(experiment: Experiment, loads: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row per system and load, over all seeds."""
    plan, rows = experiment.plan, []
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name), plan.reference_system
        with staged(plan, reference, {}, folder) as stage:
            objectives = objectives_from(plan, unloaded(experiment, stage, reference))
            capacity = plan.capacity.rps or saturation(experiment, stage, reference)
        bench = Bench(experiment, objectives, capacity)
        for system in plan.systems:
            if system.kind != "tandem":
                continue
            for load in loads:
                if system.is_simulated:
                    found = simulated(bench, system, load, seeds)
                else:
                    found = on_real_engines(bench, system, load, seeds, folder)
                rows.append(_row(system.name, load, found))
                print(rows[-1], file=sys.stderr)
    return rows


def _row(system: str, load: float, found: Explored) -> dict[str, Any]:
    late = sum(count for (_, is_late), count in found.items() if is_late)
    return {
        "system": system, "load": load, "explored": found.total(),
        "late_share": late / found.total() if found else None,
        "met_and_late_by_class": {
            name: [found[name, False], found[name, True]] for name in sorted({name for name, _ in found})
        },
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the rows."""
    parser = argparse.ArgumentParser(prog="rejections", description=__doc__)
    parser.add_argument("experiment", type=Path, help="experiment file")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace those of the file")
    parser.add_argument("--loads", type=float, nargs="+", help="replace those of the file")
    add_data(parser)
    add_results(parser)
    options = parser.parse_args(arguments)
    experiment = read_experiment(options.experiment, data_folder_option(options.data))
    loads, seeds = options.loads or experiment.plan.loads, options.seeds or experiment.plan.seeds
    write_or_print(options.results, study(experiment, loads, seeds))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
