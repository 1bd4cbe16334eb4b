"""Simulates a few boxes gate-exactly behind routers, as the oracle of the event model.

Every box is the live service on a simulated device (`simulator.simulation`), all in one virtual time. Reports
are the boxes' own. Tandem's policy is `controlplane.fleet.router.Router`; the other policies are those of
`compiled_routing`, with the same draws as in the event model. A second of a box takes some 30 ms to simulate.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from backends.cost_models.step_time import StepLoad, affine, llm_only
from benchmark_control_plane.simulator.cluster import compiled_routing as compiled
from benchmark_control_plane.simulator.cluster.scenario import (
    REPORT_PHASES,
    FleetOutcome,
    FleetResult,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import GEOMETRY, Machine, engines
from benchmark_control_plane.simulator.simulation import config_of, started
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import to_seconds
from controlplane.core.decision import Outcome
from controlplane.core.generation import Sampling
from controlplane.core.prefix_index import block_hashes
from controlplane.core.request import Request
from controlplane.fleet.load_report import LoadReport
from controlplane.fleet.router import ChosenBox, Refusal, RoutedRequest, Router
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected, Ticket

_MODEL, _CLASS = "simulated", "chat"


def _one_tenant(number: int) -> str:
    return "fleet"


@dataclass(frozen=True, slots=True)
class FleetClients:
    """Who sends requests, and what a client does after a rejection.

    Attributes:
        tenant_of: tenant of the request with a number.
        tries: most tries of a request; each begins anew, as another request with the same objectives.
        wait: seconds until the next try, by the seconds of Retry-After.
    """

    tenant_of: Callable[[int], str] = _one_tenant
    tries: int = 1
    wait: Callable[[float], float] = float


class ClientTry(NamedTuple):
    """One try of a request: when it was sent, in seconds, and how it ended."""

    at: float
    number: int
    outcome: FleetOutcome


@dataclass(frozen=True, slots=True)
class ExactResult(FleetResult):
    """The rows are those of the last try of each request; `tries` has all, in the order of their ends."""

    tries: Sequence[ClientTry]


BesideRequests = Callable[[Sequence[Service]], Coroutine[Any, Any, None]]
"""What runs beside the requests, given the boxes; it is cancelled after the last request."""


def simulate_exactly(
    scenario: FleetScenario,
    workload: FleetWorkload,
    sections: Mapping[str, Any] | None = None,
    clients: FleetClients | None = None,
    beside: BesideRequests | None = None,
) -> ExactResult:
    """Runs the workload until every request has ended.

    `sections` are merged over the configuration of the boxes. Raises ValueError for a scenario with faults or
    with more than two choices, which this simulation does not have.
    """
    if scenario.down or scenario.router_down or scenario.choices != 2:
        raise ValueError(
            f"down={scenario.down}, router_down={scenario.router_down}, choices={scenario.choices}: "
            "the oracle has no faults and two choices; leave them out"
        )
    begin = time.perf_counter()
    fleet = _Fleet(scenario, workload, clients or FleetClients())
    run(_play(fleet, sections or {}, beside))
    count = len(workload)
    return ExactResult(
        np.array([fleet.outcomes[at] for at in range(count)], np.int8),
        np.array([fleet.ttft.get(at, np.nan) for at in range(count)], np.float32),
        np.array([fleet.tpot.get(at, np.nan) for at in range(count)], np.float32),
        np.array([fleet.box_of[at] for at in range(count)], np.int32),
        np.array([fleet.cached.get(at, 0) for at in range(count)], np.int32),
        fleet.steps,
        fleet.retries,
        time.perf_counter() - begin,
        fleet.tries,
    )


@dataclass(slots=True)
class _Routed:
    """A try of a request and the box that it goes to; `draw` numbers the router's draws for it."""

    number: int
    draw: int
    router: int
    box: int


class _Fleet:
    """Boxes, routers and what came of the requests."""

    def __init__(self, scenario: FleetScenario, workload: FleetWorkload, clients: FleetClients) -> None:
        self.scenario, self.workload, self.clients = scenario, workload, clients
        self.services: list[Service] = []
        self.tries: list[ClientTry] = []
        self.steps = self.retries = 0
        self.outcomes: dict[int, FleetOutcome] = {}
        self.ttft: dict[int, float] = {}
        self.tpot: dict[int, float] = {}
        self.box_of: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self._numbers = compiled.numbers_of(scenario)
        self._arrays = compiled.new_routers(scenario, workload)
        self._routers = [Router() for _ in range(scenario.routers)]
        speeds = scenario.speeds or (1.0,) * scenario.boxes
        for router in self._routers:
            for box, speed in enumerate(speeds):
                router.add(f"{box:05}", speed)

    @property
    def _is_tandem(self) -> bool:
        return self.scenario.policy is RoutingPolicy.TANDEM

    async def report(self, box: int) -> None:
        """Reports to all routers every period, from the box's phase on."""
        period, loop = self.scenario.report_period, asyncio.get_running_loop()
        await asyncio.sleep(period / REPORT_PHASES * (box % REPORT_PHASES))
        while True:
            self._heard(box, self.services[box].load_reporter.report(), loop.time())
            await asyncio.sleep(period)

    def _heard(self, box: int, report: LoadReport, now: float) -> None:
        load = report.owners["llm"]
        free = load.free_bytes / GEOMETRY.bytes_per_token
        compiled.report(self._arrays, box, load.intercepts[_CLASS], free, now)
        self._arrays.per_token[box] = report.models[_MODEL].per_token
        for router in self._routers:
            router.heard(f"{box:05}", report, now)

    def _request(self, number: int) -> RoutedRequest:
        load, block = self.workload, GEOMETRY.block_tokens
        blocks: tuple[int, ...] = ()
        if (shared := int(load.shared[number])) > 0:
            prefix = prompt_ids(number, shared, group=int(load.group[number]), shared=shared)
            blocks = tuple(block_hashes(prefix, block))
        return RoutedRequest(
            _MODEL, _CLASS, int(load.prompt_tokens[number]), self.scenario.ttft, None, blocks, block
        )

    def choose(self, number: int, attempt: int) -> _Routed:
        """Chooses a box for a try, numbered from 0, and records the send."""
        r, now = number % self.scenario.routers, asyncio.get_running_loop().time()
        load, draw = self.workload, number + attempt * len(self.workload)
        if self._is_tandem:
            draws = (self._draw(draw, 0), self._draw(draw, 1))
            request = self._request(number)
            choice = self._routers[r].choose(request, now, draws)
            assert choice is not None
            self._routers[r].sent(request, choice, now)
            return _Routed(number, draw, r, int(choice.box))
        prompt, group, shared = load.prompt_tokens[number], load.group[number], load.shared[number]
        box = int(compiled.choose(self._arrays, self._numbers, r, draw, prompt, group, shared, now))
        compiled.record_send(self._arrays, r, box, prompt, group, shared)
        return _Routed(number, draw, r, box)

    def _draw(self, request: int, number: int) -> float:
        return compiled.uniform(self._numbers.seed, request, number)

    def _refused(self, routed: _Routed, refusals: Sequence[Refusal]) -> _Routed | float:
        """Another box, by Tandem's router only, or the client's Retry-After in seconds."""
        if not self._is_tandem or not self.scenario.retries:
            return min(refusal.retry_after for refusal in refusals)
        now, request = asyncio.get_running_loop().time(), self._request(routed.number)
        router = self._routers[routed.router]
        second = router.refused(request, refusals, now, self._draw(routed.draw, 2))
        if not isinstance(second, ChosenBox):
            return second
        self.retries += 1
        return replace(routed, box=int(second.box))

    async def serve(self, number: int) -> None:
        """Sends one request, again after rejections as its client does, and records what came of it."""
        loop, clients = asyncio.get_running_loop(), self.clients
        for attempt in range(clients.tries):
            at = loop.time()
            retry_after = await self._try(number, attempt)
            self.tries.append(ClientTry(at, number, self.outcomes[number]))
            if retry_after is None or attempt + 1 == clients.tries:
                return
            await asyncio.sleep(clients.wait(retry_after))

    async def _try(self, number: int, attempt: int) -> float | None:
        """One try of a client; the Retry-After in seconds of a rejection, else None."""
        routed: _Routed | float = self.choose(number, attempt)
        refusals: list[Refusal] = []
        while isinstance(routed, _Routed):
            self.box_of[number] = routed.box
            try:
                ticket = await self._send(routed)
            except Rejected as rejected:
                self.outcomes[number] = FleetOutcome.REJECTED
                self._arrays.open[routed.box, routed.router] -= 1
                after = rejected.reject.retry_after
                refusals.append(Refusal(f"{routed.box:05}", 1.0 if after is None else to_seconds(after)))
                routed = self._refused(routed, refusals)
                continue
            self._arrays.open[routed.box, routed.router] -= 1
            self._record(number, ticket)
            return None
        return routed

    async def _send(self, routed: _Routed) -> Ticket:
        service, load, number = self.services[routed.box], self.workload, routed.number
        output, group = int(load.output_tokens[number]), int(load.group[number])
        job = await service.intake.completion(
            RequestOrigin(str(number), self._caller(number), RequestHints(service_class=_CLASS)),
            _MODEL,
            prompt_ids(number, int(load.prompt_tokens[number]), group=group, shared=int(load.shared[number])),
            max_tokens=output,
            sampling=Sampling(max_tokens=output),
        )
        stream = await service.gate.generate(job)
        async for _ in stream:
            pass
        return stream.ticket

    def _caller(self, number: int) -> Caller:
        return Caller(self.clients.tenant_of(number))

    def _record(self, number: int, ticket: Ticket) -> None:
        seen = ticket.timeline
        self.cached[number] = ticket.cache_hit_tokens
        self.outcomes[number] = FleetOutcome.MET if ticket.outcome is Outcome.MET else FleetOutcome.LATE
        if seen.ttft is not None:
            self.ttft[number] = to_seconds(seen.ttft)
        if seen.tpot is not None:
            self.tpot[number] = to_seconds(seen.tpot)

    def count_step(self, start: float, duration: float, load: StepLoad) -> None:
        """Counts the steps of all devices."""
        self.steps += 1


async def _play(fleet: _Fleet, sections: Mapping[str, Any], beside: BesideRequests | None) -> None:
    scenario, workload, model = fleet.scenario, fleet.workload, fleet.scenario.box

    def length(request: Request) -> int:
        return int(workload.output_tokens[int(request.id.partition("-")[0])])

    objectives = {
        "ttft_ms": 1e3 * scenario.ttft,
        "tpot_ms": 1e3 * scenario.tpot,
        "sheddable": scenario.has_admission,
        "default": True,
    }
    config = config_of({"classes": {_CLASS: objectives}, **sections}, has_pool=False)
    async with AsyncExitStack() as stack:
        for speed in scenario.speeds or (1.0,) * scenario.boxes:
            seconds = (model.step, model.per_prompt_token, model.per_sequence, model.per_cell)
            step = affine(*(each / speed for each in seconds))
            machine = Machine(
                llm_only(step),
                kv_bytes=model.kv_tokens * GEOMETRY.bytes_per_token,
                max_model_tokens=16_384,
                max_running=model.max_running,
                step_tokens=model.step_tokens,
                has_prefix_cache=bool(workload.shared.any()),
            )
            generator, embedder = engines(machine, length, config, fleet.count_step)
            fleet.services.append(
                await stack.enter_async_context(started(generator, embedder, machine, config))
            )
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(fleet.report(box)) for box in range(scenario.boxes)]
            if beside is not None:
                running.append(group.create_task(beside(fleet.services)))
            await _all_served(fleet)
            for task in running:
                task.cancel()


async def _all_served(fleet: _Fleet) -> None:
    loop = asyncio.get_running_loop()
    clients = []
    for number, at in enumerate(fleet.workload.at.tolist()):
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        clients.append(asyncio.create_task(fleet.serve(number)))
    await asyncio.gather(*clients)
