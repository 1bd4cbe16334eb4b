"""Boxes as step counters, compiled: an event is the end of an engine step in which something changes.

As in the simulated engine, a step reads prompts first come, first served, up to the token budget that decodes
leave, and every decoding sequence gets one token. While nothing is read, the steps until the next end are one
event: with n sequences the KV cache grows by n cells a step, so the time of k steps is a quadratic in k. The
ends of a box are a binary heap of step numbers. So a request costs about three events, whatever its length.

A request starts if the prompts and outputs of all that run fit into the KV cache. Not modelled: order by
anything but arrival, preemption, errors of predicted lengths, pacing, embeddings.
"""

from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.simulator.cluster.binary_heaps import EventHeap, pop_end, push_end, push_event
from benchmark_control_plane.simulator.cluster.compiling import compiled
from benchmark_control_plane.simulator.cluster.scenario import (
    FleetOutcome,
    FleetScenario,
    FleetWorkload,
    Floats,
    Ints,
    Tokens,
)

# As in `predictors.timing.online_step_time`.
_DECAY = 0.998
Connections = npt.NDArray[np.int32]
_LOST, _MET, _LATE = int(FleetOutcome.LOST), int(FleetOutcome.MET), int(FleetOutcome.LATE)


class BoxArrays(NamedTuple):
    """State of all boxes; the first index is the box.

    `ends` and `ending` are each box's heap of last steps and their requests. `queue` is the ring of requests
    in the engine without a first token. Of these `reserved` counts those that hold memory, `completing` those
    whose prompt ends in the present step, and `read` is what the first of the others has read then. `waiting`
    is the ring of requests that wait at the gate. `area` is the memory-time in token-steps of the requests
    without memory. `all_seconds` and `lost_seconds` are decaying sums of the time of steps and of the prefill
    in them. `cached` and `cached_at` are the shared prefixes in the prefix cache and their last use, and
    `cached_tokens` the tokens that the last prompt with the prefix, and its output, left there.
    """

    speed: Floats
    is_up: npt.NDArray[np.bool_]
    version: Ints
    run_start: Floats
    run_steps: Ints
    step: Ints
    running: Ints
    cells: Floats
    held: Floats
    ends: Ints
    ending: Ints
    queue: Ints
    head: Ints
    tail: Ints
    reserved: Ints
    chunk: Ints
    completing: Ints
    read: Ints
    todo: Ints
    area: Floats
    waiting: Ints
    waiting_head: Ints
    waiting_tail: Ints
    all_seconds: Floats
    lost_seconds: Floats
    cached: Ints
    cached_at: Floats
    cached_tokens: Ints


class RequestArrays(NamedTuple):
    """State of all requests: the workload, and what came of it."""

    at: Floats
    prompt: Tokens
    output: Tokens
    group: Tokens
    shared: Tokens
    named: Tokens
    uncached: Tokens
    first: Floats
    outcome: npt.NDArray[np.int8]
    ttft: npt.NDArray[np.float32]
    tpot: npt.NDArray[np.float32]
    box: npt.NDArray[np.int32]
    router: npt.NDArray[np.int16]


class BoxCost(NamedTuple):
    """Numbers of `BoxModel` and the objectives."""

    step: float
    token: float
    sequence: float
    cell: float
    step_tokens: int
    kv_tokens: float
    max_running: int
    ttft: float
    tpot: float
    has_admission: bool


def cost_of(scenario: FleetScenario) -> BoxCost:
    """The numbers that the compiled functions use."""
    box = scenario.box
    return BoxCost(
        box.step, box.per_prompt_token, box.per_sequence, box.per_cell,
        box.step_tokens, float(box.kv_tokens), box.max_running, scenario.ttft, scenario.tpot,
        scenario.has_admission,
    )  # fmt: skip


def new_boxes(scenario: FleetScenario, queue: int) -> BoxArrays:
    """Empty boxes whose queues hold `queue` requests each."""
    count, model = scenario.boxes, scenario.box

    def zeros(*shape: int) -> Ints:
        return np.zeros((count, *shape), np.int64)

    return BoxArrays(
        speed=np.array(scenario.speeds or np.ones(count), np.float64),
        is_up=np.ones(count, np.bool_),
        version=zeros(),
        run_start=np.zeros(count),
        run_steps=zeros(),
        step=zeros(),
        running=zeros(),
        cells=np.zeros(count),
        held=np.zeros(count),
        ends=zeros(model.max_running),
        ending=zeros(model.max_running),
        queue=zeros(queue),
        head=zeros(),
        tail=zeros(),
        reserved=zeros(),
        chunk=zeros(),
        completing=zeros(),
        read=zeros(),
        todo=zeros(),
        area=np.zeros(count),
        waiting=zeros(queue),
        waiting_head=zeros(),
        waiting_tail=zeros(),
        all_seconds=np.zeros(count),
        lost_seconds=np.zeros(count),
        cached=np.full((count, model.cached_prefixes), -1, np.int64),
        cached_at=np.full((count, model.cached_prefixes), -1.0),
        cached_tokens=zeros(model.cached_prefixes),
    )


def new_requests(workload: FleetWorkload) -> RequestArrays:
    """The requests before the start."""
    count = len(workload)
    columns = (
        workload.prompt_tokens, workload.output_tokens, workload.group, workload.shared, workload.named,
    )  # fmt: skip
    prompt, output, group, shared, named = (column.astype(np.int32, copy=False) for column in columns)
    return RequestArrays(
        workload.at, prompt, output, group, shared, named,
        prompt.copy(),
        np.full(count, np.nan),
        np.zeros(count, np.int8),
        np.full(count, np.nan, np.float32),
        np.full(count, np.nan, np.float32),
        np.full(count, -1, np.int32),
        np.zeros(count, np.int16),
    )  # fmt: skip


@compiled
def step_seconds(cost: BoxCost, boxes: BoxArrays, g: int, tokens: int) -> float:
    """Seconds of the next step of box `g` if it reads so many prompt tokens."""
    work = cost.step + cost.token * tokens + cost.sequence * boxes.running[g] + cost.cell * boxes.cells[g]
    return work / boxes.speed[g]


@compiled
def span(cost: BoxCost, boxes: BoxArrays, g: int, steps: int) -> float:
    """Seconds of so many steps that read nothing."""
    growth = cost.cell * boxes.running[g] / boxes.speed[g]
    return steps * step_seconds(cost, boxes, g, 0) + growth * steps * (steps - 1) * 0.5


@compiled
def steps_until(cost: BoxCost, boxes: BoxArrays, g: int, seconds: float) -> int:
    """Steps that read nothing, until one ends at or after so many seconds; at least 1."""
    base = step_seconds(cost, boxes, g, 0)
    half = 0.5 * cost.cell * boxes.running[g] / boxes.speed[g]
    if half < 1e-15:
        return max(1, ceil(seconds / base))
    linear = base - half
    steps = max(1, ceil((-linear + sqrt(linear * linear + 4.0 * half * seconds)) / (2.0 * half)))
    while steps > 1 and span(cost, boxes, g, steps - 1) >= seconds:
        steps -= 1
    while span(cost, boxes, g, steps) < seconds:
        steps += 1
    return steps


@compiled
def memory_time(requests: RequestArrays, request: int) -> float:
    """Token-steps of memory that a request takes from its start to its end."""
    return (requests.prompt[request] + 0.5 * requests.output[request]) * requests.output[request]


@compiled
def plan_step(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, heap: EventHeap, g: int, now: float
) -> None:
    """Composes the next step, or the steps until the next end, and schedules their end."""
    size = boxes.queue.shape[1]
    budget = cost.step_tokens - boxes.running[g]
    at, tokens, completing, partly = boxes.head[g], 0, 0, 0
    while at < boxes.tail[g] and budget > 0:
        request = boxes.queue[g, at % size]
        if at - boxes.head[g] >= boxes.reserved[g]:
            need = requests.prompt[request] + requests.output[request]
            is_full = boxes.running[g] + boxes.reserved[g] >= cost.max_running
            if is_full or boxes.held[g] + need > cost.kv_tokens:
                break
            boxes.held[g] += need
            boxes.reserved[g] += 1
            boxes.area[g] -= memory_time(requests, request)
        left = requests.uncached[request] - (boxes.read[g] if at == boxes.head[g] else 0)
        taken = min(left, budget)
        tokens += taken
        budget -= taken
        if taken < left:
            partly = taken + (boxes.read[g] if at == boxes.head[g] else 0)
            break
        completing += 1
        at += 1
    boxes.chunk[g], boxes.completing[g], boxes.read[g] = tokens, completing, partly
    boxes.version[g] += 1
    boxes.run_start[g] = now
    if tokens > 0:
        boxes.run_steps[g] = 1
        push_event(heap, now + step_seconds(cost, boxes, g, tokens), g, boxes.version[g])
    elif boxes.running[g] > 0:
        boxes.run_steps[g] = boxes.ends[g, 0] - boxes.step[g]
        push_event(heap, now + span(cost, boxes, g, boxes.run_steps[g]), g, boxes.version[g])
    else:
        boxes.run_steps[g] = 0


@compiled
def end_steps(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, opened: Connections, g: int, now: float
) -> None:
    """Ends the steps in flight: prompts that were read get their first token, and complete requests end.

    `opened` counts the open requests by box and router.
    """
    steps = boxes.run_steps[g]
    took, kept = now - boxes.run_start[g], _DECAY**steps
    lost = min(took, boxes.chunk[g] * cost.token / boxes.speed[g])
    # Of `steps` equal ones, each decays with those after it.
    boxes.all_seconds[g] = kept * boxes.all_seconds[g] + took / steps * (1.0 - kept) / (1.0 - _DECAY)
    boxes.lost_seconds[g] = kept * boxes.lost_seconds[g] + lost
    boxes.step[g] += steps
    boxes.cells[g] += steps * boxes.running[g]
    size = boxes.queue.shape[1]
    for _ in range(boxes.completing[g]):
        request = boxes.queue[g, boxes.head[g] % size]
        boxes.head[g] += 1
        boxes.reserved[g] -= 1
        boxes.todo[g] -= requests.uncached[request]
        requests.first[request] = now
        requests.ttft[request] = now - requests.at[request]
        boxes.cells[g] += requests.prompt[request]
        last = boxes.step[g] + requests.output[request] - 1
        push_end(boxes.ends[g], boxes.ending[g], boxes.running[g], last, request)
        boxes.running[g] += 1
    boxes.completing[g] = 0
    while boxes.running[g] > 0 and boxes.ends[g, 0] <= boxes.step[g]:
        request = boxes.ending[g, 0]
        pop_end(boxes.ends[g], boxes.ending[g], boxes.running[g])
        boxes.running[g] -= 1
        output = requests.output[request]
        boxes.cells[g] -= requests.prompt[request] + output - 1
        boxes.held[g] -= requests.prompt[request] + output
        is_met = requests.ttft[request] <= cost.ttft
        if output > 1:
            requests.tpot[request] = (now - requests.first[request]) / (output - 1)
            is_met = is_met and requests.tpot[request] <= cost.tpot
        requests.outcome[request] = _MET if is_met else _LATE
        opened[g, requests.router[request]] -= 1


@compiled
def lose_all(boxes: BoxArrays, requests: RequestArrays, g: int) -> None:
    """Ends all requests of a box that dies as lost, and empties it."""
    size = boxes.queue.shape[1]
    for at in range(boxes.running[g]):
        requests.outcome[boxes.ending[g, at]] = _LOST
    for at in range(boxes.head[g], boxes.tail[g]):
        requests.outcome[boxes.queue[g, at % size]] = _LOST
    for at in range(boxes.waiting_head[g], boxes.waiting_tail[g]):
        requests.outcome[boxes.waiting[g, at % size]] = _LOST
    boxes.waiting_head[g] = boxes.waiting_tail[g]
    boxes.all_seconds[g] = boxes.lost_seconds[g] = 0.0
    boxes.version[g] += 1
    boxes.head[g] = boxes.tail[g]
    boxes.run_steps[g] = boxes.running[g] = boxes.reserved[g] = boxes.chunk[g] = 0
    boxes.completing[g] = boxes.read[g] = boxes.todo[g] = 0
    boxes.cells[g] = boxes.held[g] = boxes.area[g] = 0.0
    boxes.cached[g, :] = -1
