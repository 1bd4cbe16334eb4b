"""Measures which requests should be preempted: rules for victims under equal arrivals.

    python -m benchmark_control_plane.experiments.gate.victims configs/bench/eviction.yaml [--results FILE]

Each rule ranks the running requests of one priority: in an engine with a static order (`edf`), at the gate
with vLLM's own scheduler, or in the default order (`srmt`); lower priorities always go first. In `srmt` the
values of its own ranking are given to the requests in the order of the rule, so that as many may be preempted
for an urgent one. `own` is its own ranking, also without one of its terms. Simulated; two minutes. Prints
the attainment in percent.
"""

import argparse
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, cast
from zlib import crc32

import numpy as np

from benchmark_control_plane.common.command_line import data_folder_option
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.measurement_stages import Bench, staged
from benchmark_control_plane.judge.reference_system import objectives_from, unloaded
from benchmark_control_plane.judge.system_schema import SystemSection
from controlplane.core.clock import milliseconds
from controlplane.core.pool_view import Running
from controlplane.policy.engine.gate_view_adapter import preemptible_of
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.plan_builder import LOST_LANE, Ranking
from controlplane.policy.engine.srmt import ShortestRemainingMemoryTime
from controlplane.policy.gate.preemption import VictimRank, in_preemption_order, latest_started
from controlplane.policy.registry import ENGINE_POLICIES, VICTIMS, EnginePolicyFactory

_TAU = milliseconds(100)


def cost(running: Running, *, recompute: bool = True, slack: bool = True) -> float:
    """The former rule: lost work and urgency per byte, more for requests that were preempted before."""
    urgency = 0.0
    if slack and running.slack is not None and running.slack >= 0:
        urgency = (1 + running.priority) * _TAU * _TAU / (running.slack + _TAU)
    lost = running.recompute if recompute else 0
    return (lost + urgency) * (1 + running.preemptions) / max(1, running.freed_bytes)


def random(running: Running) -> float:
    """A checksum of the id and of the number of output tokens, so a new value with every token."""
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
SRMT_ARMS = ("latest-started", "random", "least-recently-used", "most-recompute", "least-recompute")
_OWN_TERMS: dict[str, dict[str, float]] = {
    "own": {},
    "own-without-recompute": {"recompute_weight": 0},
    "own-without-cutoff": {"size_cutoff_share": 0},
}
"""Arms by the options of `srmt` that differ; of one without a size cutoff no requests are beyond it."""


class RankedSrmt(ShortestRemainingMemoryTime):
    """SRMT that preempts in the order of another rule."""

    def __init__(self, options: EngineOptions, rank: VictimRank) -> None:
        super().__init__(options)
        self._rank_of = rank

    def _ranking(self, view: EngineView) -> Ranking:
        running = view.running
        place = {name: index for index, name in enumerate(running.ids)}
        order = [place[one.request_id] for one in in_preemption_order(preemptible_of(view), self._rank_of)]
        sizes = np.empty(len(order))
        sizes[order] = np.sort(super()._ranking(view).sizes)[::-1]
        return Ranking(running, sizes, spared=self._aged.running)


class SrmtWithoutSlack(ShortestRemainingMemoryTime):
    """SRMT that does not preempt lost requests before others."""

    def _ranking(self, view: EngineView) -> Ranking:
        sizes = super()._ranking(view).sizes
        sizes = np.where(sizes >= LOST_LANE, sizes - LOST_LANE, sizes)
        return Ranking(view.running, sizes, spared=self._aged.running)


def _srmt_by(rank: VictimRank) -> EnginePolicyFactory:
    return lambda options: RankedSrmt(options, rank)


def _register_arms() -> None:
    """Adds the rules to the tables of policies."""
    cast(dict[str, VictimRank], VICTIMS).update(ENGINE_ARMS)
    policies = cast(dict[str, EnginePolicyFactory], ENGINE_POLICIES)
    policies["own-without-slack"] = SrmtWithoutSlack
    policies["own"] = policies["srmt"]
    for arm in SRMT_ARMS:
        policies[arm] = _srmt_by(ENGINE_ARMS[arm])


def systems() -> list[SystemSection]:
    """One system for each arm."""
    scheduling: dict[str, dict[str, Any]] = {}
    for arm in ENGINE_ARMS:
        scheduling[f"edf: {arm}"] = {"engine": {"ordering": "edf"}, "victims": arm}
    for arm in GATE_ARMS:
        scheduling[f"gate: {arm}"] = {"engine": "off", "victims": arm}
    for arm in (*SRMT_ARMS, "own-without-slack"):
        scheduling[f"srmt: {arm}"] = {"engine": {"ordering": arm}}
    for arm, changes in _OWN_TERMS.items():
        # Under another name, so that the gate makes the same estimate as for the other rules.
        scheduling[f"srmt: {arm}"] = {"engine": {"ordering": "own", **changes}}
    scheduling["srmt"] = {"engine": {}}
    return [
        SystemSection(name=name, kind="ablation", simulated={"scheduling": sections})
        for name, sections in scheduling.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per run, then the mean of each arm, overall and by class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="replaces the seeds of the experiment")
    parser.add_argument(
        "--arms", nargs="+", default=["*"], help="only arms of these names, with * for any part"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    _register_arms()
    arms = [each for each in systems() if any(fnmatchcase(each.name, name) for name in options.arms)]
    experiment = read_experiment(options.experiment, data_folder_option(None))
    plan, reference = experiment.plan, experiment.plan.reference_system
    assert plan.capacity.rps is not None, "the experiment states the capacity"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with staged(plan, reference, {}, folder) as stage:
            objectives = objectives_from(plan, unloaded(experiment, stage, reference))
        bench = Bench(experiment, objectives, plan.capacity.rps)
        for seed, system in product(options.seeds or plan.seeds, arms):
            with staged(plan, system, objectives, folder) as stage:
                entry, _ = bench.run(stage, system, plan.loads[0], seed, lambda *_: None)
            attained, preemptions = entry["attainment"], entry["engine"]["preemptions"]
            runs.append(
                {"arm": system.name, "seed": seed, "attainment": attained, "preemptions": preemptions}
            )
            print(f"{system.name:32} seed {seed}  {100 * attained['overall']:5.1f}", flush=True)
    for system in arms:
        found = [run["attainment"] for run in runs if run["arm"] == system.name]
        means = {key: 100 * mean(attained[key] for attained in found) for key in found[0]}
        print(f"{system.name:32}" + "  ".join(f"{key} {value:5.1f}" for key, value in means.items()))
    write_or_print(options.results, {"runs": runs})


if __name__ == "__main__":
    main()
