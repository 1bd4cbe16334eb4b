"""How is an experiment run? `tandem bench run EXPERIMENT.yaml --out DIR`.

In this order: the reference system gives unloaded latencies (the objectives) and capacity (100 % load);
variants of a system are tried and the best stays; then systems, a few up at once, take turns load by
load, the other way round with every other seed; then each system's frontier is narrowed down. A run that
is not valid counts nowhere; that of a real system is tried once more.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_control_plane.common.arguments import BadInput, stated_data
from benchmark_control_plane.judge.experiment import Experiment, first_variant, quick, read_experiment
from benchmark_control_plane.judge.experiment_schema import SystemSection
from benchmark_control_plane.judge.frontier_search import highest_load
from benchmark_control_plane.judge.progress import ProgressDisplay
from benchmark_control_plane.judge.records import RequestRecord
from benchmark_control_plane.judge.results import ResultsWriter
from benchmark_control_plane.judge.stages import (
    Bench,
    Stage,
    objectives_from,
    saturation,
    staged,
    unloaded,
)

_SWEEP_LOAD = 1.0
_TRIES = 2

Keep = Callable[[Mapping[str, Any], Iterable[RequestRecord]], None]
"""Of a run: its entry in the results, and the records behind it."""


@dataclass(slots=True)
class _ExperimentRun:
    bench: Bench
    results: ResultsWriter
    folder: Path
    progress: ProgressDisplay

    @property
    def seeds(self) -> Sequence[int]:
        return self.bench.experiment.plan.seeds

    def measure(self, stage: Stage, system: SystemSection, load: float, seed: int) -> float | None:
        """Attainment overall, None if no run was valid; each is kept."""
        title = f"{system.name}, {load:.0%}, seed {seed}"
        return self._attained(stage, system, load, seed, title, self.results.add)

    def _attained(
        self, stage: Stage, system: SystemSection, load: float, seed: int, title: str, keep: Keep
    ) -> float | None:
        for _ in range(1 if system.is_simulated else _TRIES):
            entry, records = self.bench.run(stage, system, load, seed, self.progress.ticker(title))
            keep(entry, records)
            self.progress.ran(title, entry)
            self.bench.settle(stage, system, load, seed)
            if entry["valid"]:
                return entry["attainment"]["overall"] or 0.0
        return None

    def select_variant(self, system: SystemSection) -> SystemSection:
        """With the best of its variants; seeds of their own, so that luck is not carried over."""
        if not system.variants:
            return system
        kept: dict[str, float] = {}
        for name, split in system.variants.items():
            one = replace(system, split=split, variants={})
            with staged(self.bench.experiment.plan, one, self.bench.objectives, self.folder) as stage:
                attained = self._attained(
                    stage, one, _SWEEP_LOAD, max(self.seeds) + 1, f"{system.name}: {name}", _discard
                )
                if attained is not None:
                    kept[name] = attained
        best = max(kept, key=kept.__getitem__, default=next(iter(system.variants)))
        self.results.add_sweep(
            {"system": system.name, "load": _SWEEP_LOAD, "attainment": kept, "chosen": best}
        )
        return replace(system, split=system.variants[best], variants={})

    def run_group(self, systems: Sequence[SystemSection]) -> None:
        plan = self.bench.experiment.plan
        with ExitStack() as stack:
            stages = {
                s.name: stack.enter_context(staged(plan, s, self.bench.objectives, self.folder))
                for s in systems
            }
            found: dict[tuple[str, int], dict[float, float]] = {}
            for turn, seed in enumerate(plan.seeds):
                for load in sorted({load for s in systems for load in s.loads or plan.loads}):
                    for system in systems if turn % 2 == 0 else systems[::-1]:
                        if load in (system.loads or plan.loads) and seed in (system.seeds or plan.seeds):
                            kept = self.measure(stages[system.name], system, load, seed)
                            if kept is not None:
                                found.setdefault((system.name, seed), {})[load] = kept
            for system in systems:
                if system.frontier:
                    self._frontiers(stages[system.name], system, found)

    def _frontiers(
        self, stage: Stage, system: SystemSection, found: dict[tuple[str, int], dict[float, float]]
    ) -> None:
        frontier = self.bench.experiment.plan.frontier
        for target in frontier.targets:
            per_seed = []
            for seed in system.seeds or self.seeds:
                measured = found.get((system.name, seed), {})

                def attainment_at(
                    load: float, seed: int = seed, known: dict[float, float] = measured
                ) -> float | None:
                    if (kept := self.measure(stage, system, load, seed)) is not None:
                        known[load] = kept
                    return kept

                load = highest_load(dict(measured), target, steps=frontier.steps, attainment_at=attainment_at)
                per_seed.append(None if load is None else load * self.bench.capacity)
            self.results.add_frontier(
                {"system": system.name, "target": target, "rps": median_rate(per_seed), "per_seed": per_seed}
            )


def median_rate(per_seed: Sequence[float | None]) -> float | None:
    """The median; a seed that kept the target at no rate is the lowest, and None where it is the middle."""
    rising = sorted(rate or 0.0 for rate in per_seed)
    return median(rising) if rising[(len(rising) - 1) // 2] else None


def _discard(entry: Mapping[str, Any], records: Iterable[RequestRecord]) -> None:
    """What only chooses among variants is no result."""


def run(experiment: Experiment, results: ResultsWriter, folder: Path, progress: ProgressDisplay) -> None:
    """Raises BadInput, RuntimeError for a server that does not come up, KeyboardInterrupt."""
    plan = experiment.plan
    reference = first_variant(plan.reference_system)
    with staged(plan, reference, {}, folder) as stage:
        progress.say(f"unloaded latencies on {reference.name}")
        alone = unloaded(experiment, stage, reference)
        objectives = objectives_from(plan, alone)
        progress.say(f"capacity of {reference.name}")
        capacity = plan.capacity.rps or saturation(experiment, stage, reference)
    results.measure(alone, objectives, capacity)
    progress.say(f"100 % load is {capacity:.2f} requests a second")
    course = _ExperimentRun(Bench(experiment, objectives, capacity), results, folder, progress)
    systems = [course.select_variant(system) for system in plan.systems]
    for first in range(0, len(systems), plan.together):
        course.run_group(systems[first : first + plan.together])
    results.finish()


def planned_runs(experiment: Experiment) -> int:
    plan = experiment.plan
    return sum(
        len(s.loads or plan.loads) * len(s.seeds or plan.seeds) + len(s.variants) for s in plan.systems
    )


def run_experiment(
    path: Path,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    is_quick: bool = False,
    data: Path | None = None,
) -> int:
    """0 done, 1 a server failed, 2 one stopped answering, 130 interrupted; what was measured is kept, and
    where nothing was BadInput raised. Raises OSError."""
    experiment = read_experiment(path, stated_data(data))
    if is_quick:
        experiment = replace(experiment, plan=quick(experiment.plan))
    if seeds:
        systems = tuple(replace(system, seeds=None) for system in experiment.plan.systems)
        plan = replace(experiment.plan, seeds=tuple(seeds), systems=systems)
        experiment = replace(experiment, plan=plan)
    results = ResultsWriter(experiment, out)
    progress = ProgressDisplay(sys.stderr, planned_runs(experiment))
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
    progress.say(f"{why}{len(results.runs)} runs are kept in {out}, marked partial")
    return status
