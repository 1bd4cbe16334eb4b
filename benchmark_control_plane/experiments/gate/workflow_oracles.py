"""Measures what a gate would earn that knew the stages to come of each workflow (decision 0085).

    python -m benchmark_control_plane.experiments.gate.workflow_oracles configs/bench/workflow.yaml

Two kinds of oracle against the systems of the experiment: the deadline is divided by the true work of the
stages (`true_work_division`), and the gate reserves for the answer that an admitted reranking announces
(`announced_answers`). Each row has the attainment by class, in which that of the answers is the share of
workflows kept, and where the others were lost.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any

from benchmark_control_plane.common.command_line import add_data, data_folder_option, exit_status
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.experiments.gate.announced_answers import AnnouncingTarget, Reserve
from benchmark_control_plane.experiments.gate.true_work_division import TrueWork, divided, work_ms
from benchmark_control_plane.judge.experiment_file import Experiment, classes_section, merge, read_experiment
from benchmark_control_plane.judge.measurement_stages import Act, Bench, Result, requests_of, staged
from benchmark_control_plane.judge.records import RequestRecord, without_warmup
from benchmark_control_plane.judge.reference_system import objectives_from, unloaded
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

_RESERVES: Mapping[str, Reserve] = {
    "memory": Reserve(memory=True),
    "mean memory": Reserve(memory=True, is_mean=True),
    "time": Reserve(time=True),
    "memory and time": Reserve(memory=True, time=True),
    "mean memory and time": Reserve(memory=True, time=True, is_mean=True),
    "refused at the reranking": Reserve(early=("rerank",)),
    "refused at the reranking, by the mean size": Reserve(early=("rerank",), is_mean=True),
    "refused at the query": Reserve(early=("query", "rerank")),
    "all": Reserve(memory=True, time=True, early=("query", "rerank")),
}
_DIVISIONS: Mapping[str, TrueWork] = {
    "by work": TrueWork("flexibility"),
    "by work, 2 % at least": TrueWork("flexibility", least=0.02),
    "by work, 5 % at least": TrueWork("flexibility", least=0.05),
    "work and an equal part of the slack": TrueWork("slack"),
    "all but the later work": TrueWork("effective"),
    "all but twice the later work": TrueWork("effective", times=2.0),
}


@dataclass(frozen=True, slots=True)
class OracleArm:
    """A system of the experiment, with a division or a reserve that needs an oracle."""

    name: str
    system: SystemSection
    division: TrueWork | None = None
    reserve: Reserve | None = None

    @classmethod
    def all_of(cls, systems: Sequence[SystemSection]) -> "list[OracleArm]":
        """The systems alone, the divisions by work, and each reserve with each system."""
        arms = [cls(system.name, system) for system in systems]
        arms += [cls(name, systems[0], division) for name, division in _DIVISIONS.items()]
        arms += [
            cls(f"{system.name}, scaled by work", system, TrueWork("shares", shares=system.deadlines.shares))
            for system in systems
            if system.deadlines is not None and system.deadlines.shares
        ]
        arms += [
            cls(f"{system.name}, reserve: {name}", system, None, reserve)
            for system in systems
            for name, reserve in _RESERVES.items()
        ]
        return arms


@dataclass(frozen=True, slots=True)
class _OracleBench(Bench):
    """A bench whose workflows state a division by true work, if there is one."""

    division: TrueWork | None

    def requests(self, system: SystemSection, rate: float, seed: int) -> list[PlannedRequest]:
        """Plan of a run at `rate` requests per second."""
        drawn = requests_of(self.experiment, system, rate, seed)
        if self.division is None:
            return drawn
        return divided(drawn, self.experiment.plan.device_of(system), self.division)


@dataclass(frozen=True, slots=True)
class _ReservingStage:
    """The service on a simulated device, with a gate that reserves for announced answers."""

    bench: Bench
    arm: OracleArm
    requests: Sequence[PlannedRequest]
    shares_machine = False

    def act(self, act: "Act[Result]") -> Result:
        return virtual_time.run(self._acted(act))

    async def _acted(self, act: "Act[Result]") -> Result:
        plan, system = self.bench.experiment.plan, self.arm.system
        sections = merge({"classes": classes_section(plan, self.bench.objectives)}, system.simulated or {})
        assert self.arm.reserve is not None
        async with simulated_target(plan.device_of(system), sections, has_gate=True) as target:
            announcing = AnnouncingTarget(target, self.requests, self.arm.reserve)
            result = await act(announcing, asyncio.get_running_loop().time, target.sample)
            await announcing.settle()
            return result


def measured(bench: Bench, arm: OracleArm, load: float, seed: int, folder: Path) -> dict[str, Any]:
    """One run: attainment of each class in percent, and the losses of the workflows."""
    plan = bench.experiment.plan
    bench = _OracleBench(bench.experiment, bench.objectives, bench.capacity, arm.division)
    requests = bench.requests(arm.system, load * bench.capacity, seed)
    if arm.reserve is not None:
        stage = _ReservingStage(bench, arm, requests)
        entry, records = bench.run(stage, arm.system, load, seed, lambda *_: None)
    else:
        with staged(plan, arm.system, bench.objectives, folder) as plain:
            entry, records = bench.run(plain, arm.system, load, seed, lambda *_: None)
    works = work_ms(requests, plan.device_of(arm.system))
    lost, wasted_ms = losses(without_warmup(records), works)
    attained = {name: share for name, share in entry["attainment"].items() if share is not None}
    return {
        "arm": arm.name, "load": load, "seed": seed, "valid": entry["valid"],
        "attainment": {name: round(100 * share, 1) for name, share in attained.items()},
        "workflows": sum(lost.values()),
        "lost": {name: count for name, count in lost.items() if name != "kept"},
        "wasted_share": round(wasted_ms / 1e3 / plan.window.measured_s, 3),
    }  # fmt: skip


def losses(records: Sequence[RequestRecord], works: Mapping[str, float]) -> tuple[Counter[str], float]:
    """Workflows by stage and outcome of their loss, or `kept`; and ms of embedding for the lost ones."""
    workflows: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.planned.stage is not None:
            workflows.setdefault(record.planned.stage.workflow, []).append(record)
    found, wasted = Counter[str](), 0.0
    for stages in workflows.values():
        ordered = sorted(stages, key=lambda r: (r.planned.kind is Kind.GENERATE, "rerank" in r.planned.id))
        first = next((r for r in ordered if r.outcome is not Outcome.MET), None)
        stage = None if first is None else first.planned.stage
        if first is None or stage is None:
            found["kept"] += 1
            continue
        found[f"{stage.name} {first.outcome.name.lower()}"] += 1
        served = [r for r in ordered if r.planned.kind is Kind.EMBED and r.is_delivered]
        wasted += sum(works[r.planned.id] for r in served)
    return found, wasted


def study(experiment: Experiment, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of all arms whose name matches one of `chosen`, at the loads and seeds of the experiment."""
    plan, rows = experiment.plan, []
    patterns = chosen or ["*"]
    arms = [arm for arm in OracleArm.all_of(plan.systems) if any(fnmatchcase(arm.name, p) for p in patterns)]
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name), plan.reference_system
        with staged(plan, reference, {}, folder) as stage:
            objectives = objectives_from(plan, unloaded(experiment, stage, reference))
        assert plan.capacity.rps is not None
        bench = Bench(experiment, objectives, plan.capacity.rps)
        for arm in arms:
            for load in plan.loads:
                found = [measured(bench, arm, load, seed, folder) for seed in plan.seeds]
                rows += found
                print(_line(found), file=sys.stderr, flush=True)
    return rows


def _line(found: Sequence[Mapping[str, Any]]) -> str:
    kept = [row["attainment"]["answers"] for row in found]
    beside = {
        name: round(mean(row["attainment"].get(name, 0.0) for row in found))
        for name in ("interactive", "indexing")
    }
    count = sum(row["workflows"] for row in found)
    lost = sum((Counter(row["lost"]) for row in found), Counter[str]())
    parts = ", ".join(f"{name} {100 * number / count:.1f}" for name, number in sorted(lost.items()))
    wasted = mean(row["wasted_share"] for row in found)
    return (
        f"{found[0]['arm']:44} {found[0]['load']:4.0%} "
        f"kept {mean(kept):5.1f} ({min(kept):.0f} to {max(kept):.0f}) {beside} wasted {wasted:.3f} | {parts}"
        + ("" if all(row["valid"] for row in found) else " INVALID")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the rows."""
    parser = argparse.ArgumentParser(prog="workflow_oracles", description=__doc__)
    parser.add_argument("experiment", type=Path, help="experiment file")
    parser.add_argument("--arms", nargs="+", default=[], help="only arms of these names, with * for any part")
    parser.add_argument("--seeds", type=int, nargs="+", help="replace those of the file")
    parser.add_argument("--loads", type=float, nargs="+", help="replace those of the file")
    add_data(parser)
    add_results(parser)
    options = parser.parse_args(arguments)
    experiment = read_experiment(options.experiment, data_folder_option(options.data))
    plan = experiment.plan
    plan = replace(plan, loads=tuple(options.loads or plan.loads), seeds=tuple(options.seeds or plan.seeds))
    write_or_print(options.results, study(replace(experiment, plan=plan), options.arms))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
