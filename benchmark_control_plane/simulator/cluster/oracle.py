"""Simulates a few boxes gate-exactly behind routers, as the oracle of the event model.

Every box is the live service on a simulated device (`simulator.simulation`), all in one virtual time. Reports
are the boxes' own. Tandem's policy is `controlplane.fleet.router.Router`; the other policies are those of
`compiled_routing`, with the same draws as in the event model. A second of a box takes some 30 ms to simulate.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

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
_CALLER = Caller("fleet")


def simulate_exactly(
    scenario: FleetScenario, workload: FleetWorkload, sections: Mapping[str, Any] | None = None
) -> FleetResult:
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
    fleet = run(_play(scenario, workload, sections or {}))
    count = len(workload)
    return FleetResult(
        np.array([fleet.outcomes[at] for at in range(count)], np.int8),
        np.array([fleet.ttft.get(at, np.nan) for at in range(count)], np.float32),
        np.array([fleet.tpot.get(at, np.nan) for at in range(count)], np.float32),
        np.array([fleet.box_of[at] for at in range(count)], np.int32),
        np.array([fleet.cached.get(at, 0) for at in range(count)], np.int32),
        fleet.steps,
        fleet.retries,
        time.perf_counter() - begin,
    )


@dataclass(slots=True)
class _Routed:
    """A request and the box that it goes to; `choice` is that of the routing library."""

    number: int
    router: int
    box: int
    choice: ChosenBox | None = None


class _Fleet:
    """Boxes, routers and what came of the requests."""

    def __init__(self, scenario: FleetScenario, workload: FleetWorkload) -> None:
        self.scenario, self.workload = scenario, workload
        self.services: list[Service] = []
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

    def choose(self, number: int) -> _Routed:
        """Chooses a box and records the send."""
        r, now = number % self.scenario.routers, asyncio.get_running_loop().time()
        load = self.workload
        if self._is_tandem:
            draws = (self._draw(number, 0), self._draw(number, 1))
            request = self._request(number)
            choice = self._routers[r].choose(request, now, draws)
            assert choice is not None
            self._routers[r].sent(request, choice, now)
            return _Routed(number, r, int(choice.box), choice)
        prompt, group, shared = load.prompt_tokens[number], load.group[number], load.shared[number]
        box = int(compiled.choose(self._arrays, self._numbers, r, number, prompt, group, shared, now))
        compiled.record_send(self._arrays, r, box, prompt, group, shared)
        return _Routed(number, r, box)

    def _draw(self, number: int, draw: int) -> float:
        return compiled.uniform(self._numbers.seed, number, draw)

    def retry(self, routed: _Routed, retry_after: float) -> _Routed | None:
        """Another box after a refusal, by Tandem's router only."""
        if not self._is_tandem or not self.scenario.retries or routed.choice is None:
            return None
        now, number = asyncio.get_running_loop().time(), routed.number
        refusal = Refusal(routed.choice.box, retry_after)
        second = self._routers[routed.router].refused(
            self._request(number), [refusal], now, self._draw(number, 2)
        )
        if not isinstance(second, ChosenBox):
            return None
        self.retries += 1
        return _Routed(number, routed.router, int(second.box))

    async def serve(self, number: int) -> None:
        """Sends one request and records what came of it."""
        routed: _Routed | None = self.choose(number)
        while routed is not None:
            self.box_of[number] = routed.box
            try:
                ticket = await self._send(routed)
            except Rejected as rejected:
                self.outcomes[number] = FleetOutcome.REJECTED
                self._arrays.open[routed.box, routed.router] -= 1
                after = rejected.reject.retry_after
                routed = self.retry(routed, 1.0 if after is None else to_seconds(after))
                continue
            self._arrays.open[routed.box, routed.router] -= 1
            self._record(number, ticket)
            return

    async def _send(self, routed: _Routed) -> Ticket:
        service, load, number = self.services[routed.box], self.workload, routed.number
        output, group = int(load.output_tokens[number]), int(load.group[number])
        job = await service.intake.completion(
            RequestOrigin(str(number), _CALLER, RequestHints(service_class=_CLASS)),
            _MODEL,
            prompt_ids(number, int(load.prompt_tokens[number]), group=group, shared=int(load.shared[number])),
            max_tokens=output,
            sampling=Sampling(max_tokens=output),
        )
        stream = await service.gate.generate(job)
        async for _ in stream:
            pass
        return stream.ticket

    def _record(self, number: int, ticket: Ticket) -> None:
        seen = ticket.timeline
        self.cached[number] = ticket.cached_tokens
        self.outcomes[number] = FleetOutcome.MET if ticket.outcome is Outcome.MET else FleetOutcome.LATE
        if seen.ttft is not None:
            self.ttft[number] = to_seconds(seen.ttft)
        if seen.tpot is not None:
            self.tpot[number] = to_seconds(seen.tpot)

    def count_step(self, start: float, duration: float, load: StepLoad) -> None:
        """Counts the steps of all devices."""
        self.steps += 1


async def _play(scenario: FleetScenario, workload: FleetWorkload, sections: Mapping[str, Any]) -> _Fleet:
    fleet, model = _Fleet(scenario, workload), scenario.box

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
        reports = [asyncio.create_task(fleet.report(box)) for box in range(scenario.boxes)]
        await _all_served(fleet)
        for task in reports:
            task.cancel()
    return fleet


async def _all_served(fleet: _Fleet) -> None:
    loop = asyncio.get_running_loop()
    clients = []
    for number, at in enumerate(fleet.workload.at.tolist()):
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        clients.append(asyncio.create_task(fleet.serve(number)))
    await asyncio.gather(*clients)
