"""Simulates a fleet of any size by events: arrivals, ends of steps, reports, and boxes that die or start.

Boxes are those of `box_steps`, routers those of `compiled_routing`. Request `i` goes to router `i` modulo
their number; the others get the requests of a router that is down. A sixteenth of the boxes reports at a
time, so reports are spread over the period. A box that is down refuses connections; the router then takes
another one at random, since nothing was started. The run is sequential and deterministic: the same scenario
and workload give the same hash on any machine with the same floating-point functions.
"""

import time
from typing import NamedTuple

import numpy as np

from benchmark_control_plane.simulator.cluster.binary_heaps import EventHeap, new_heap, pop_event
from benchmark_control_plane.simulator.cluster.box_gate import admit_waiting, enqueue, intercept_of, is_late
from benchmark_control_plane.simulator.cluster.box_steps import (
    BoxArrays,
    BoxCost,
    RequestArrays,
    cost_of,
    end_steps,
    lose_all,
    new_boxes,
    new_requests,
    plan_step,
)
from benchmark_control_plane.simulator.cluster.compiled_routing import (
    RouterArrays,
    RoutingNumbers,
    cached_tokens,
    choose,
    drawn_other,
    forecast,
    may_retry,
    new_routers,
    numbers_of,
    record_send,
    report,
    router_of,
    uniform,
)
from benchmark_control_plane.simulator.cluster.compiling import compiled
from benchmark_control_plane.simulator.cluster.scenario import (
    REPORT_PHASES,
    FleetOutcome,
    FleetResult,
    FleetScenario,
    FleetWorkload,
    Floats,
    Ints,
)

_QUEUE = 1_024
_REJECTED, _LOST = int(FleetOutcome.REJECTED), int(FleetOutcome.LOST)


class Faults(NamedTuple):
    """Times at which boxes die or start, in order."""

    at: Floats
    box: Ints
    is_start: Ints


def simulate_fleet(scenario: FleetScenario, workload: FleetWorkload) -> FleetResult:
    """Runs the workload until every request has ended."""
    requests = new_requests(workload)
    boxes, routers = new_boxes(scenario, _QUEUE), new_routers(scenario, workload)
    heap = new_heap(4_096 + 64 * scenario.boxes)
    begin = time.perf_counter()
    events, retries = _run(
        cost_of(scenario), numbers_of(scenario), boxes, routers, requests, heap, _faults(scenario),
        scenario.report_period,
    )  # fmt: skip
    took = time.perf_counter() - begin
    cached = requests.prompt - requests.uncached
    return FleetResult(
        requests.outcome, requests.ttft, requests.tpot, requests.box, cached, events, retries, took
    )


def _faults(scenario: FleetScenario) -> Faults:
    rows = [(begin, box, 0) for box, begin, _ in scenario.down]
    rows += [(end, box, 1) for box, _, end in scenario.down]
    rows.sort()
    columns = np.array(rows, np.float64).reshape(-1, 3)
    return Faults(columns[:, 0].copy(), columns[:, 1].astype(np.int64), columns[:, 2].astype(np.int64))


@compiled
def _report(
    cost: BoxCost, boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays, phase: int, now: float
) -> None:
    """Gives the reports of the boxes of one phase to the routers."""
    for box in range(phase, len(boxes.speed), REPORT_PHASES):
        if boxes.is_up[box]:
            free = cost.kv_tokens - boxes.held[box] - boxes.todo[box]
            report(routers, box, intercept_of(cost, boxes, requests, box), free, now)


@compiled
def _accepts(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, box: int, request: int, now: float
) -> bool:
    waiting = boxes.waiting_tail[box] - boxes.waiting_head[box]
    return waiting < boxes.waiting.shape[1] and not is_late(cost, boxes, requests, box, request, now)


@compiled
def _second_box(
    numbers: RoutingNumbers, boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays, r: int,
    box: int, request: int, now: float,
) -> int:  # fmt: skip
    """Another box after a refusal, or -1; a box that is down has started nothing and needs no budget."""
    other = drawn_other(routers.cumulative, box, uniform(numbers.seed, request, 2))
    if other == box or not boxes.is_up[box]:
        return other if other != box else -1
    if not numbers.retries:
        return -1
    prompt, group, named = (
        int(requests.prompt[request]),
        int(requests.group[request]),
        int(requests.named[request]),
    )
    age = now - routers.described_at[other]
    ttft = forecast(routers, numbers, r, other, prompt, cached_tokens(routers, other, group, named))
    if not may_retry(routers.budget[r], age, ttft, numbers.ttft, numbers.retry_headroom, numbers.useful_for):
        return -1
    routers.budget[r] -= 1.0
    return other


@compiled
def _arrive(
    cost: BoxCost, numbers: RoutingNumbers, boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays,
    heap: EventHeap, request: int,
) -> int:  # fmt: skip
    """Routes a request and gives it to a box, or ends it; returns the second tries."""
    now = requests.at[request]
    r = router_of(numbers, len(routers.turn), request, now)
    requests.router[request] = r
    prompt, group, named = (
        int(requests.prompt[request]),
        int(requests.group[request]),
        int(requests.named[request]),
    )
    box = choose(routers, numbers, r, request, prompt, group, named, now)
    routers.budget[r] = min(numbers.retry_burst, routers.budget[r] + numbers.retry_share)
    for tries in range(2):
        record_send(routers, r, box, prompt, group, named)
        requests.box[request] = box
        is_up = boxes.is_up[box]
        if is_up and _accepts(cost, boxes, requests, box, request, now):
            enqueue(cost, boxes, requests, heap, routers.open, box, request, now)
            return tries
        routers.open[box, r] -= 1
        other = -1
        if tries == 0:
            other = _second_box(numbers, boxes, routers, requests, r, box, request, now)
        if other < 0:
            requests.outcome[request] = _REJECTED if is_up else _LOST
            return tries
        box = other
    return 1


@compiled
def _apply_fault(
    boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays, box: int, is_start: int
) -> None:
    if is_start:
        boxes.is_up[box] = True
        return
    boxes.is_up[box] = False
    lose_all(boxes, requests, box)
    routers.open[box, :] = 0


@compiled
def _finish(
    cost: BoxCost, boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays, heap: EventHeap
) -> int:
    """Handles the earliest end of steps; returns 1, or 0 for an entry that is out of date."""
    now, box, version = heap.time[0], heap.box[0], heap.version[0]
    pop_event(heap)
    if version != boxes.version[box]:
        return 0
    end_steps(cost, boxes, requests, routers.open, box, now)
    admit_waiting(cost, boxes, requests, routers.open, box, now)
    plan_step(cost, boxes, requests, heap, box, now)
    return 1


@compiled
def _run(
    cost: BoxCost, numbers: RoutingNumbers, boxes: BoxArrays, routers: RouterArrays, requests: RequestArrays,
    heap: EventHeap, faults: Faults, period: float,
) -> tuple[int, int]:  # fmt: skip
    """The loop over all events; returns their number and that of second tries."""
    events = retries = request = fault = reports = 0
    slot = period / REPORT_PHASES
    count = len(requests.at)
    while request < count or heap.size[0] > 0:
        arrival = requests.at[request] if request < count else np.inf
        step = heap.time[0] if heap.size[0] > 0 else np.inf
        reported = reports * slot if request < count else np.inf
        broken = faults.at[fault] if fault < len(faults.at) else np.inf
        earliest = min(arrival, step, reported, broken)
        if broken == earliest:
            _apply_fault(boxes, routers, requests, faults.box[fault], faults.is_start[fault])
            fault += 1
        elif reported == earliest:
            _report(cost, boxes, routers, requests, reports % REPORT_PHASES, reported)
            reports += 1
        elif step == earliest:
            events += _finish(cost, boxes, routers, requests, heap)
        else:
            retries += _arrive(cost, numbers, boxes, routers, requests, heap, request)
            request += 1
            events += 1
    return events, retries
