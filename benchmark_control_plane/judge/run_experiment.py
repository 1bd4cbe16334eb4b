"""Runs an experiment: `tandem bench run EXPERIMENT.yaml --out DIR`.

The phases are, in order: unloaded latencies (hence objectives) and capacity (100 % load) of the reference
system; choice of the best variant of each system; runs at every load and seed, alternating between the
systems that are up at the same time, in reverse order for every other seed; bisection of each system's
frontier. An invalid run counts nowhere; on real engines it is repeated once.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, data_folder_option
from benchmark_control_plane.common.machine_load import cpu_snapshot, fixed_work_ms, others_cores
from benchmark_control_plane.common.results_file import file_name
from benchmark_control_plane.common.work_probe import probed_work
from benchmark_control_plane.judge.experiment_file import (
    Experiment,
    first_variant,
    quick,
)
from benchmark_control_plane.judge.experiment_matrix import read_cells
from benchmark_control_plane.judge.frontier_search import highest_load, is_decided
from benchmark_control_plane.judge.hindsight.hindsight_bounds import HindsightBounds
from benchmark_control_plane.judge.measurement_stages import Bench, Stage, staged
from benchmark_control_plane.judge.open_files import allow_open_files
from benchmark_control_plane.judge.progress import ProgressDisplay
from benchmark_control_plane.judge.records import RequestRecord
from benchmark_control_plane.judge.reference_system import objectives_from, saturation, unloaded
from benchmark_control_plane.judge.results import ResultsWriter
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.report.aggregates import median_rate
from benchmark_control_plane.report.matrix_results import write_matrix

_SWEEP_LOAD = 1.0
_TRIES = 2

StoreRun = Callable[[Mapping[str, Any], Iterable[RequestRecord]], None]
"""Stores a run: its entry in the results, and its records."""


@dataclass(slots=True)
class _ExperimentRun:
    """An experiment whose objectives and capacity are known."""

    bench: Bench
    bounds: HindsightBounds
    results: ResultsWriter
    folder: Path
    progress: ProgressDisplay

    @property
    def seeds(self) -> Sequence[int]:
        return self.bench.experiment.plan.seeds

    def measure(self, stage: Stage, system: SystemSection, load: float, seed: int) -> float | None:
        """Attainment over all requests, None if no run was valid; stores every run.

        A cell that results which are continued have is not run again.
        """
        if (known := self.results.attained(system.name, load, seed)) is not None:
            return known
        title = f"{system.name}, {load:.0%}, seed {seed}"
        return self._measure(stage, system, load, seed, title, self.results.add)

    def _measure(
        self, stage: Stage, system: SystemSection, load: float, seed: int, title: str, store: StoreRun
    ) -> float | None:
        for _ in range(1 if system.is_simulated else _TRIES):
            ticker = self.progress.ticker(title)
            if system.starts_servers:
                work_ms, before = fixed_work_ms(), cpu_snapshot()
                with probed_work() as during:
                    entry, records = self.bench.run(stage, system, load, seed, ticker)
                    others = others_cores(before, cpu_snapshot())
                entry |= {"work_ms": work_ms, "busy_work_ms": median(during), "other_cores": others}
            else:
                entry, records = self.bench.run(stage, system, load, seed, ticker)
            if system.is_simulated and load in (system.loads or self.bench.experiment.plan.loads):
                try:
                    entry["bound"] = self.bounds.of(system, load, seed)
                except ArithmeticError as error:
                    # The run counts without its bound.
                    self.progress.print_line(f"{title}: no bound: {error}")
                    entry["bound"] = None
            store(entry, records)
            self.progress.report_run(title, entry)
            self.bench.settle(stage, system, load, seed)
            if entry["valid"]:
                return entry["attainment"]["overall"] or 0.0
        return None

    def select_variant(self, system: SystemSection) -> SystemSection:
        """The system with its best variant, tried on a seed of its own so that the choice is not biased."""
        if not system.variants:
            return system
        if (chosen := self.results.chosen_variant(system.name)) is not None:
            return replace(system, split=system.variants[chosen], variants={})
        attained_by: dict[str, float] = {}
        for name, split in system.variants.items():
            variant = replace(system, split=split, variants={})
            with staged(self.bench.experiment.plan, variant, self.bench.objectives, self.folder) as stage:
                attained = self._measure(
                    stage, variant, _SWEEP_LOAD, max(self.seeds) + 1, f"{system.name}: {name}", _discard
                )
                if attained is not None:
                    attained_by[name] = attained
        best = max(attained_by, key=attained_by.__getitem__, default=next(iter(system.variants)))
        self.results.add_sweep(
            {"system": system.name, "load": _SWEEP_LOAD, "attainment": attained_by, "chosen": best}
        )
        return replace(system, split=system.variants[best], variants={})

    def run_group(self, systems: Sequence[SystemSection]) -> None:
        """Starts these systems together and measures them alternately, then their frontiers."""
        plan = self.bench.experiment.plan
        with ExitStack() as stack:
            stages = {
                s.name: stack.enter_context(staged(plan, s, self.bench.objectives, self.folder))
                for s in systems
            }
            found: dict[tuple[str, int], dict[float, float]] = {}
            for number, seed in enumerate(plan.seeds):
                for load in sorted({load for s in systems for load in s.loads or plan.loads}):
                    for system in systems if number % 2 == 0 else systems[::-1]:
                        if load in (system.loads or plan.loads) and seed in (system.seeds or plan.seeds):
                            attained = self.measure(stages[system.name], system, load, seed)
                            if attained is not None:
                                found.setdefault((system.name, seed), {})[load] = attained
            for system in systems:
                if system.frontier:
                    self._frontiers(stages[system.name], system, found)

    def _frontiers(
        self, stage: Stage, system: SystemSection, found: dict[tuple[str, int], dict[float, float]]
    ) -> None:
        """Adds the rates of a system, without seeds whose crossing may lie at a load without a valid run."""
        plan = self.bench.experiment.plan
        own = system.loads or plan.loads
        planned = {*own, *(load for load in plan.loads if load < max(own))}
        for target in plan.frontier.targets:
            per_seed: dict[int, float | None] = {}
            for seed in system.seeds or self.seeds:
                measured = found.get((system.name, seed), {})

                def attainment_at(
                    load: float, seed: int = seed, known: dict[float, float] = measured
                ) -> float | None:
                    if (attained := self.measure(stage, system, load, seed)) is not None:
                        known[load] = attained
                    return attained

                load = highest_load(
                    dict(measured), target, steps=plan.frontier.steps, attainment_at=attainment_at
                )
                if is_decided(measured, planned, target):
                    per_seed[seed] = None if load is None else load * self.bench.capacity
            if per_seed:
                rates = list(per_seed.values())
                self.results.add_frontier(
                    {
                        "system": system.name, "target": target, "rps": median_rate(rates),
                        "per_seed": rates, "seeds": list(per_seed),
                    }
                )  # fmt: skip


def _discard(entry: Mapping[str, Any], records: Iterable[RequestRecord]) -> None:
    """Stores nothing: trial runs of variants are not results."""


def run(experiment: Experiment, results: ResultsWriter, folder: Path, progress: ProgressDisplay) -> None:
    """Runs all phases; raises BadInput, KeyboardInterrupt, and RuntimeError if a server does not start."""
    plan = experiment.plan
    if (capacity := results.capacity) is None:
        capacity = _measure_reference(experiment, results, folder, progress)
    else:
        progress.print_line(f"continuing with {len(results.runs)} runs and their objectives")
    objectives = results.objectives
    progress.print_line(f"100 % load is {capacity:.2f} requests per second")
    bounds = HindsightBounds(experiment, objectives, capacity)
    bench = Bench(experiment, objectives, capacity)
    # Before the servers start, which inherit the limit and accept as many connections.
    allow_open_files(_most_requests(bench))
    experiment_run = _ExperimentRun(bench, bounds, results, folder, progress)
    systems = [experiment_run.select_variant(system) for system in plan.systems]
    for first in range(0, len(systems), plan.together):
        experiment_run.run_group(systems[first : first + plan.together])
    results.finish()


def _measure_reference(
    experiment: Experiment, results: ResultsWriter, folder: Path, progress: ProgressDisplay
) -> float:
    """Stores unloaded latencies of the reference, the objectives that follow and the capacity; returns it."""
    plan = experiment.plan
    reference = first_variant(plan.reference_system)
    with staged(plan, reference, {}, folder) as stage:
        progress.print_line(f"measuring unloaded latencies on {reference.name}")
        unloaded_ms = unloaded(experiment, stage, reference)
        objectives = objectives_from(plan, unloaded_ms)
        progress.print_line(f"measuring the capacity of {reference.name}")
        capacity = plan.capacity.rps or saturation(experiment, stage, reference)
    results.measure(unloaded_ms, objectives, capacity)
    return capacity


def _most_requests(bench: Bench) -> int:
    """Requests of the largest run on real engines; 0 if all systems are simulated."""
    plan = bench.experiment.plan
    live = [system for system in plan.systems if not system.is_simulated]
    runs = ((system, max(system.loads or plan.loads), seed) for system in live for seed in plan.seeds)
    sizes = (len(bench.requests(system, load * bench.capacity, seed)) for system, load, seed in runs)
    return max(sizes, default=0)


def _runs_left(experiment: Experiment, results: ResultsWriter) -> int:
    """Number of runs without bisection, repetitions and those that the results have."""
    plan, left = experiment.plan, 0
    for system in plan.systems:
        cells = product(system.loads or plan.loads, system.seeds or plan.seeds)
        left += sum(results.attained(system.name, load, seed) is None for load, seed in cells)
        left += len(system.variants) if results.chosen_variant(system.name) is None else 0
    return left


def run_experiment(
    path: Path,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    is_quick: bool = False,
    is_resumed: bool = False,
    data: Path | None = None,
) -> int:
    """Runs an experiment file and writes its results to `out`, those of a matrix to a folder per cell.

    Args:
        path: experiment file.
        out: output folder.
        seeds: replace the seeds of the experiment and of its systems.
        is_quick: reduce the plan to about a minute.
        is_resumed: keep the runs in `out`, with their objectives and capacity, and measure only what is
            missing.
        data: folder of public data sets.

    Returns:
        0 if done, 1 if a server did not start, 2 if a system stopped responding, 130 if interrupted.
        Completed runs are kept in all cases.

    Raises:
        BadInput: the file is invalid, a system did not respond before the first run, or the runs to keep are
            those of another experiment or machine.
        OSError: `out` is not writable.
    """
    if is_quick and is_resumed:
        raise BadInput("--resume continues whole experiments; leave out --quick")
    cells = read_cells(path, data_folder_option(data))
    if list(cells) == [""]:
        return _run_one(cells[""], out, seeds, is_quick=is_quick, is_resumed=is_resumed)
    status = 0
    for number, (cell, experiment) in enumerate(cells.items(), start=1):
        print(f"cell {number} of {len(cells)}: {cell}", file=sys.stderr, flush=True)
        status = _run_one(experiment, out / file_name(cell), seeds, is_quick=is_quick, is_resumed=is_resumed)
        write_matrix(out, path.stem, {name: out / file_name(name) for name in list(cells)[:number]})
        if status:
            break
    return status


def _run_one(
    experiment: Experiment, out: Path, seeds: Sequence[int] | None, *, is_quick: bool, is_resumed: bool
) -> int:
    if is_quick:
        experiment = replace(experiment, plan=quick(experiment.plan))
    if seeds:
        systems = tuple(replace(system, seeds=None) for system in experiment.plan.systems)
        plan = replace(experiment.plan, seeds=tuple(seeds), systems=systems)
        experiment = replace(experiment, plan=plan)
    results = ResultsWriter(experiment, out, is_resumed=is_resumed)
    progress = ProgressDisplay(sys.stderr, _runs_left(experiment, results))
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(experiment, results, Path(folder), progress)
            return 0
        except KeyboardInterrupt:
            status, why = 130, "interrupted; "
        except RuntimeError as error:
            status, why = 1, f"{error}\n"
        except BadInput as error:
            if not results.runs:
                raise
            status, why = 2, f"{error}\n"
    progress.print_line(f"{why}{len(results.runs)} runs are kept in {out}, marked partial")
    return status
