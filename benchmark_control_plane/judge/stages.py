"""How does one system do under one load with one seed? The same course of action live and simulated.

Rule: before each run both kinds must answer a probe, which also waits for what an earlier run left behind; so
they must after it where other systems share the machine, or what one left would pass for slowness of the
next. A run whose client lagged, or that cut requests off before their promise could be judged, is invalid.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import uvloop

from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.common.http_client import connections
from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.experiment import Experiment, ExperimentPlan, classes_section, merge
from benchmark_control_plane.judge.experiment_schema import SystemSection
from benchmark_control_plane.judge.memory import MemorySampler, Read, metrics_reader
from benchmark_control_plane.judge.records import RequestRecord, slo_targets, without_warmup
from benchmark_control_plane.judge.runner import Clock, RunResult, Target, Tick, closed_loop, play
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.systems import Objectives, Up, up
from benchmark_control_plane.judge.workload import PlannedRequest, planned
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

Result = TypeVar("Result")
Act = Callable[[Target, Clock, Read | None], Coroutine[Any, Any, Result]]

_NICENESS_LEAD = 10
"""Steps of niceness by which the client comes before the servers."""
_PROBE_SECONDS = 120.0
_SAMPLE_SECONDS = 0.5
_UNLOADED_REQUESTS = 12
"""Requests of each class that are asked alone, for the unloaded latencies."""
_SATURATING_RPS = (500.0, 4_000.0)
"""Of what is drawn for a saturation probe: more where all were answered before it ended."""
_RAMP_UP_SHARE = 0.25
"""Of a saturation probe: until as many run as will."""
_UNDECIDED_SHARE = 0.01


class Stage(Protocol):
    """Where a system can be asked; each act finds it empty. `shares_machine` with other systems."""

    @property
    def shares_machine(self) -> bool: ...

    def act(self, act: "Act[Result]") -> Result: ...


@dataclass(frozen=True, slots=True)
class LiveStage:
    up: Up
    limit: int
    shares_machine = True

    def act(self, act: "Act[Result]") -> Result:
        with _client_priority(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._acted(act))

    async def _acted(self, act: "Act[Result]") -> Result:
        async with self.up.target(self.limit) as target:
            if self.up.metrics is None:
                return await act(target, time.perf_counter, None)
            async with connections(self.up.metrics, 1) as pool:
                read = metrics_reader(self.up.metrics, pool, self.up.kv_bytes)
                return await act(target, time.perf_counter, read)


@contextmanager
def _client_priority() -> Iterator[None]:
    """The client takes little of the servers' cores but must have it at once: else what it measures is its
    own waiting. Where raising one's priority is not allowed, the lateness of sending tells."""
    # Nor may a collection of garbage hold up what is due.
    gc.collect()
    gc.freeze()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - _NICENESS_LEAD)
    try:
        yield
    finally:
        gc.unfreeze()
        # Lowering it is always allowed, and where it was not raised this changes nothing.
        os.setpriority(os.PRIO_PROCESS, 0, before)


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """Each act begins with a new service at time 0."""

    plan: ExperimentPlan
    system: SystemSection
    objectives: Objectives
    shares_machine = False

    def act(self, act: "Act[Result]") -> Result:
        return virtual_time.run(self._acted(act))

    async def _acted(self, act: "Act[Result]") -> Result:
        classes = {"classes": classes_section(self.plan, self.objectives)}
        sections = merge(classes, self.system.simulated or {})
        sections.pop("models", None)
        device = self.plan.device_of(self.system)
        async with simulated_target(device, sections, has_gate=not self.system.ungated) as target:
            clock = asyncio.get_running_loop().time
            return await act(target, clock, target.sample)


@contextmanager
def staged(
    plan: ExperimentPlan, system: SystemSection, objectives: Objectives, folder: Path
) -> Iterator[Stage]:
    """Raises RuntimeError if a server does not come up."""
    opened: AbstractContextManager[Up | None] = (
        nullcontext(None) if system.is_simulated else up(plan, system, objectives, folder)
    )
    with opened as running:
        if running is None:
            yield SimulatedStage(plan, system, objectives)
        else:
            yield LiveStage(running, plan.window.connections)


@dataclass(frozen=True, slots=True)
class Bench:
    """An experiment with its measure: `capacity` in requests a second is 100 % load."""

    experiment: Experiment
    objectives: Objectives
    capacity: float

    def run(
        self, stage: Stage, system: SystemSection, load: float, seed: int, tick: Tick
    ) -> tuple[dict[str, Any], list[RequestRecord]]:
        """One entry of results.json's runs, and the records behind it. Raises BadInput if nobody answers."""
        plan = self.experiment.plan
        requests = self.requests(system, load * self.capacity, seed)
        watch = MemorySampler()

        async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
            await probe(target, requests, clock, system.name)
            return await _run_with_sampler(self, target, requests, clock, read, watch, seed, tick)

        played = stage.act(act)
        records = without_warmup(played.records)
        late = analysis.lateness(played.lateness)
        why = _why_invalid(records, late, plan.window.lateness_limit_ms)
        priorities = {name: promise.priority for name, promise in plan.classes.items()}
        measured = plan.window.measured_s
        entry = {
            "system": system.name, "load": load, "offered_rps": len(records) / measured, "seed": seed,
            "valid": why is None, "why_invalid": why, "send_lateness_ms": late,
            **analysis.summary(records, measured=measured, seed=seed, priorities=priorities),
            "memory": watch.memory(), "engine": watch.engine(),
        }  # fmt: skip
        return entry, played.records

    def settle(self, stage: Stage, system: SystemSection, load: float, seed: int) -> None:
        """Returns when nothing of a run is left for the next system to pay for. Raises BadInput if nobody
        answers; the run before was measured all the same."""
        requests = self.requests(system, load * self.capacity, seed)

        async def act(target: Target, clock: Clock, read: Read | None) -> None:
            await probe(target, requests, clock, system.name)

        if stage.shares_machine:
            stage.act(act)

    def requests(self, system: SystemSection, rate: float, seed: int) -> list[PlannedRequest]:
        return requests_of(self.experiment, system, rate, seed)


def requests_of(
    experiment: Experiment, system: SystemSection, rate: float, seed: int, measured: float | None = None
) -> list[PlannedRequest]:
    plan = experiment.plan
    streams = {
        name: replace(stream, arrivals=system.arrivals[name]) if name in system.arrivals else stream
        for name, stream in plan.streams.items()
    }
    return planned(
        streams, rate=rate, seed=seed, warmup=plan.window.warmup_s,
        measured=measured or plan.window.measured_s, data=experiment.data,
    )  # fmt: skip


async def _run_with_sampler(
    bench: Bench,
    target: Target,
    requests: Sequence[PlannedRequest],
    clock: Clock,
    read: Read | None,
    watch: MemorySampler,
    seed: int,
    tick: Tick,
) -> RunResult:
    window = bench.experiment.plan.window
    prepare = getattr(target, "prepare", None)
    if prepare is not None:
        prepare(requests, seed)
    following = None
    if read is not None:
        origin = clock() + window.warmup_s
        following = asyncio.create_task(watch.poll(read, clock, origin, _SAMPLE_SECONDS))
    try:
        return await play(
            target, requests, slo_targets(bench.objectives),
            warmup=window.warmup_s, drain=window.drain_s, clock=clock, tick=tick,
        )  # fmt: skip
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def probe(target: Target, requests: Sequence[PlannedRequest], clock: Clock, name: str) -> None:
    """Each kind answers, if only to say no. Raises BadInput."""
    kinds = {one.kind: one for one in reversed(requests)}
    asked = [
        replace(one, id=f"probe-{one.id}", output_tokens=min(one.output_tokens, 1), after=None)
        for one in kinds.values()
    ]
    try:
        result = RunResult()
        if asked:
            requests_sent = closed_loop(
                target, asked, clients=len(asked), seconds=_PROBE_SECONDS, clock=clock
            )
            result = await asyncio.wait_for(requests_sent, _PROBE_SECONDS)
    except TimeoutError:
        raise BadInput(f"system {name!r}: no answer within {_PROBE_SECONDS:g} s; is it overloaded?") from None
    for record in result.records:
        if record.outcome is Outcome.FAILED:
            kind = record.planned.kind
            raise BadInput(f"system {name!r} does not answer a request to {kind}: {record.error}")


def _why_invalid(
    records: Sequence[RequestRecord], late: Mapping[str, float | None], limit_ms: float
) -> str | None:
    if not records:
        return "no request fell into the window; lengthen it or raise the load"
    if (p99 := late["p99"]) is not None and p99 > limit_ms:
        return f"the client sent 1 % of the requests more than {p99:.1f} ms late; {limit_ms:g} ms are allowed"
    undecided = sum(r.outcome is Outcome.ABORTED for r in records)
    if undecided > _UNDECIDED_SHARE * len(records):
        return f"{undecided} requests were given up before their promise was broken; lengthen drain_s"
    return None


# --- the measure -----------------------------------------------------------------------------


def unloaded(experiment: Experiment, stage: Stage, system: SystemSection) -> dict[str, dict[str, float]]:
    """Median milliseconds by class of requests that are alone."""
    drawn = requests_of(experiment, system, 50.0, seed=0, measured=60.0)
    chosen = [
        one
        for name in experiment.plan.classes
        for one in [r for r in drawn if r.service_class == name][: _UNLOADED_REQUESTS + 1]
    ]

    async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
        await probe(target, drawn, clock, system.name)
        return await closed_loop(target, chosen, clients=1, seconds=float("inf"), clock=clock)

    records = stage.act(act).records
    found: dict[str, dict[str, float]] = {}
    for name, group in analysis.group_by(records, lambda r: r.planned.service_class).items():
        # The first of its kind warms up.
        latencies = {m: [getattr(r, m) for r in group[1:]] for m in ("ttft_ms", "tpot_ms", "e2e_ms")}
        found[name] = {
            metric: median(present)
            for metric, values in latencies.items()
            if (present := [v for v in values if v is not None])
        }
        if any(r.planned.kind is Kind.EMBED for r in group) and "e2e_ms" in found[name]:
            found[name].setdefault("ttft_ms", found[name]["e2e_ms"])
    return found


def objectives_from(plan: ExperimentPlan, alone: Objectives) -> dict[str, dict[str, float]]:
    """What each class is promised, in milliseconds. Raises BadInput for a multiple of nothing."""
    found: dict[str, dict[str, float]] = {}
    for name, promise in plan.classes.items():
        found[name] = {}
        for part in ("ttft", "tpot", "e2e"):
            metric, times = f"{part}_ms", getattr(promise.times_unloaded, part)
            if (stated := getattr(promise, metric)) is not None:
                found[name][metric] = plan.slo_scale * stated
            elif times is not None:
                if metric not in alone.get(name, {}):
                    raise BadInput(
                        f"classes.{name}.times_unloaded.{part}: no request of this class has a {part} when "
                        "alone; drop it"
                    )
                found[name][metric] = plan.slo_scale * times * alone[name][metric]
    return found


def saturation(experiment: Experiment, stage: Stage, system: SystemSection) -> float:
    """Requests a second answered when so many clients never pause. Raises BadInput if there are none."""
    for rate in _SATURATING_RPS:
        played, is_whole = _saturated(experiment, stage, system, rate)
        if is_whole:
            break
    else:
        raise BadInput(
            f"system {system.name!r} was done with {len(played.records)} requests before the probe's "
            f"{experiment.plan.capacity.probe_s:g} s were over; state capacity.rps, or lower capacity.clients"
        )
    start, end = _RAMP_UP_SHARE * experiment.plan.capacity.probe_s, experiment.plan.capacity.probe_s
    whole = [r for r in played.records if r.outcome is Outcome.MET]
    answered = [r for r in whole if r.last is not None and start <= r.last < end]
    if not answered:
        raise BadInput(f"system {system.name!r} answered nothing within {end:g} s; lengthen capacity.probe_s")
    return len(answered) / (end - start)


def _saturated(
    experiment: Experiment, stage: Stage, system: SystemSection, rate: float
) -> tuple[RunResult, bool]:
    """With whether there was always somebody left to ask."""
    capacity = experiment.plan.capacity
    drawn = requests_of(experiment, system, rate, seed=1, measured=capacity.probe_s)

    async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
        await probe(target, drawn, clock, system.name)
        return await closed_loop(
            target, drawn, clients=capacity.clients, seconds=capacity.probe_s, clock=clock
        )  # fmt: skip

    played = stage.act(act)
    return played, len(played.records) < len(drawn)
