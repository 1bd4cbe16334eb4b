"""Measures one system at one load with one seed, in the same way live and simulated.

Before each run a probe of every kind of request must be answered; it also waits until an earlier run's
backlog is served. If systems share the machine, a probe follows the run too, so that the backlog of one
system does not slow down the next. A run is invalid if the client sent too late, or if it cut off requests
whose outcome was undecided.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.common.http_client import connections
from benchmark_control_plane.common.machine_load import raised_session
from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.experiment_file import (
    Experiment,
    ExperimentPlan,
    classes_section,
    merge,
)
from benchmark_control_plane.judge.http_target import HttpTarget
from benchmark_control_plane.judge.memory_sampler import MemorySampler, Read, metrics_reader
from benchmark_control_plane.judge.open_loop_client import (
    Clock,
    RunResult,
    Target,
    Tick,
    closed_loop,
    open_loop,
)
from benchmark_control_plane.judge.records import RequestRecord, slo_targets, without_warmup
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.judge.systems import Objectives, RunningSystem, running_system
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest, plan_requests
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome

Result = TypeVar("Result")
Act = Callable[[Target, Clock, Read | None], Coroutine[Any, Any, Result]]

_NICENESS_LEAD = 10
"""Nice levels by which the load generator and its session have priority over the servers."""
_PROBE_SECONDS = 120.0
_SAMPLE_SECONDS = 0.5
_UNDECIDED_SHARE = 0.01


class Stage(Protocol):
    """A running system, or the means to start one for each measurement."""

    @property
    def shares_machine(self) -> bool:
        """Whether other systems run on the same machine."""

    def act(self, act: "Act[Result]") -> Result:
        """Runs a measurement on the system and returns its result."""


@dataclass(frozen=True, slots=True)
class LiveStage:
    """Servers reached over HTTP, on a real clock."""

    running_system: RunningSystem
    shares_machine = True

    def act(self, act: "Act[Result]") -> Result:
        with _client_priority(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._acted(act))

    async def _acted(self, act: "Act[Result]") -> Result:
        async with self.running_system.target() as target:
            if self.running_system.metrics is None:
                return await act(target, time.perf_counter, None)
            async with connections(self.running_system.metrics, 1) as pool:
                read = metrics_reader(self.running_system.metrics, pool, self.running_system.kv_bytes)
                return await act(target, time.perf_counter, read)


@contextmanager
def _client_priority() -> Iterator[None]:
    """Raises the CPU priority of the load generator, which needs little CPU but needs it immediately.

    Without the permission to raise it, delays show in the send lateness.
    """
    # Garbage collection must not delay requests that are due.
    gc.collect()
    gc.freeze()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - _NICENESS_LEAD)
    try:
        with raised_session(_NICENESS_LEAD):
            yield
    finally:
        gc.unfreeze()
        # Lowering the priority is always allowed, and changes nothing if it was not raised.
        os.setpriority(os.PRIO_PROCESS, 0, before)


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """The service on a simulated device, started at virtual time 0 for each measurement."""

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
    """Starts a system until the block ends; raises RuntimeError if a server does not start."""
    opened: AbstractContextManager[RunningSystem | None] = (
        nullcontext(None) if system.is_simulated else running_system(plan, system, objectives, folder)
    )
    with opened as running:
        if running is None:
            yield SimulatedStage(plan, system, objectives)
        else:
            yield LiveStage(running)


@dataclass(frozen=True, slots=True)
class Bench:
    """An experiment, its objectives in ms by class, and its capacity: requests per second at 100 % load."""

    experiment: Experiment
    objectives: Objectives
    capacity: float

    def run(
        self, stage: Stage, system: SystemSection, load: float, seed: int, tick: Tick
    ) -> tuple[dict[str, Any], list[RequestRecord]]:
        """Runs one load with one seed; returns the entry of results.json and the records.

        Raises BadInput if the system does not answer the probe.
        """
        plan = self.experiment.plan
        requests = self.requests(system, load * self.capacity, seed)
        sampler = MemorySampler()

        async def act(target: Target, clock: Clock, read: Read | None) -> RunResult:
            await probe(target, requests, clock, system.name)
            return await _run_with_sampler(self, target, requests, clock, read, sampler, seed, tick)

        result = stage.act(act)
        records = without_warmup(result.records)
        late = analysis.lateness(result.lateness)
        why = _why_invalid(records, late, plan.window.lateness_limit_ms)
        priorities = {name: class_section.priority for name, class_section in plan.classes.items()}
        measured = plan.window.measured_s
        entry = {
            "system": system.name, "load": load, "offered_rps": len(records) / measured, "seed": seed,
            "valid": why is None, "why_invalid": why, "send_lateness_ms": late,
            **analysis.summary(records, measured=measured, seed=seed, priorities=priorities),
            "memory": sampler.memory(), "engine": sampler.engine(measured),
        }  # fmt: skip
        return entry, result.records

    def settle(self, stage: Stage, system: SystemSection, load: float, seed: int) -> None:
        """Waits until the backlog of a run is served, if other systems share the machine.

        Raises BadInput if the system does not answer; the run before remains valid.
        """
        if not stage.shares_machine:
            return
        requests = self.requests(system, load * self.capacity, seed)

        async def act(target: Target, clock: Clock, read: Read | None) -> None:
            await probe(target, requests, clock, system.name)

        stage.act(act)

    def requests(self, system: SystemSection, rate: float, seed: int) -> list[PlannedRequest]:
        """Plan of a run at `rate` requests per second."""
        return requests_of(self.experiment, system, rate, seed)


def requests_of(
    experiment: Experiment, system: SystemSection, rate: float, seed: int, measured: float | None = None
) -> list[PlannedRequest]:
    """Plan of requests at `rate` per second, with what the system states of them; `measured` in seconds."""
    plan = experiment.plan
    streams = {
        name: replace(stream, arrivals=system.arrivals[name]) if name in system.arrivals else stream
        for name, stream in plan.streams.items()
    }
    requests = plan_requests(
        streams, rate=rate, seed=seed, warmup=plan.window.warmup_s,
        measured=measured or plan.window.measured_s, data=experiment.data,
    )  # fmt: skip
    if system.known_lengths:
        requests = [replace(request, max_tokens=None) for request in requests]
    return [r if r.stage is None else replace(r, stage=_stated(plan, system, r.stage)) for r in requests]


def _stated(plan: ExperimentPlan, system: SystemSection, stage: WorkflowStage) -> WorkflowStage:
    """The stage with its deadline scaled as all objectives, and what its request states of it."""
    scaled = replace(stage, deadline_ms=plan.slo_scale * stage.deadline_ms)
    return scaled if system.deadlines is None else system.deadlines.applied(scaled)


async def _run_with_sampler(
    bench: Bench,
    target: Target,
    requests: Sequence[PlannedRequest],
    clock: Clock,
    read: Read | None,
    sampler: MemorySampler,
    seed: int,
    tick: Tick,
) -> RunResult:
    window = bench.experiment.plan.window
    if isinstance(target, HttpTarget):
        target.prepare(requests, seed)
    sampling = None
    if read is not None:
        origin = clock() + window.warmup_s
        sampling = asyncio.create_task(sampler.poll(read, clock, origin, _SAMPLE_SECONDS))
    try:
        return await open_loop(
            target, requests, slo_targets(bench.objectives),
            warmup=window.warmup_s, drain=window.drain_s, clock=clock, tick=tick,
        )  # fmt: skip
    finally:
        if sampling is not None:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


async def probe(target: Target, requests: Sequence[PlannedRequest], clock: Clock, name: str) -> None:
    """Sends one short request of every kind; raises BadInput if one fails or gets no response."""
    kinds = {r.kind: r for r in reversed(requests)}
    probes = [
        replace(r, id=f"probe-{r.id}", output_tokens=min(r.output_tokens, 1), after=None)
        for r in kinds.values()
    ]
    try:
        responses = closed_loop(target, probes, clients=len(probes), seconds=_PROBE_SECONDS, clock=clock)
        result = await asyncio.wait_for(responses, _PROBE_SECONDS)
    except TimeoutError:
        raise BadInput(
            f"system {name!r}: no response to a probe within {_PROBE_SECONDS:g} s; is it overloaded?"
        ) from None
    for record in result.records:
        if record.outcome is Outcome.FAILED:
            kind = record.planned.kind
            raise BadInput(f"system {name!r} does not answer a request to {kind}: {record.error}")


def _why_invalid(
    records: Sequence[RequestRecord], late: Mapping[str, float | None], limit_ms: float
) -> str | None:
    if not records:
        return "no request falls into the measured window; lengthen it or raise the load"
    if (p99 := late["p99"]) is not None and p99 > limit_ms:
        return f"the client sent 1 % of the requests more than {p99:.1f} ms late; {limit_ms:g} ms are allowed"
    undecided = sum(r.outcome is Outcome.ABORTED for r in records)
    if undecided > _UNDECIDED_SHARE * len(records):
        return f"{undecided} requests were cut off before they missed an objective; lengthen drain_s"
    return None
