"""The gate of a simulated box, compiled: its forecast, what it rejects, and what waits for the TPOT guard.

A busy box rejects a request that would be late behind the work in its engine, at arrival and while it waits.
Of the TPOT guard (`controlplane.policy.gate.tpot_guard`) rule 2 is modelled: a step with one more sequence
stays within the objective, less the share of time that prefill takes. Rule 1, the chances of others, is not.
"""

from benchmark_control_plane.simulator.cluster.binary_heaps import EventHeap, push_event
from benchmark_control_plane.simulator.cluster.box_steps import (
    BoxArrays,
    BoxCost,
    Connections,
    RequestArrays,
    memory_time,
    plan_step,
    span,
    step_seconds,
    steps_until,
)
from benchmark_control_plane.simulator.cluster.compiling import compiled
from benchmark_control_plane.simulator.cluster.scenario import FleetOutcome

_REJECTED = int(FleetOutcome.REJECTED)


@compiled
def _found(boxes: BoxArrays, requests: RequestArrays, g: int, request: int, now: float) -> int:
    """Tokens that the prefix cache has; from now on it has this prompt instead of the least recently used."""
    group = requests.group[request]
    if group < 0 or boxes.cached.shape[1] == 0:
        return 0
    place, found = 0, 0
    for at in range(boxes.cached.shape[1]):
        if boxes.cached[g, at] == group:
            place, found = at, min(requests.shared[request], boxes.cached_tokens[g, at])
            break
        if boxes.cached_at[g, at] < boxes.cached_at[g, place]:
            place = at
    boxes.cached[g, place] = group
    boxes.cached_at[g, place] = now
    boxes.cached_tokens[g, place] = requests.prompt[request] + requests.output[request]
    return found


@compiled
def wait_for_start(cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, g: int) -> float:
    """Seconds until the next end where the first prompt lacks memory or a slot, and then for the queue.

    As in the gate, the queue drains as a fluid through the whole memory.
    """
    at = boxes.head[g] + boxes.reserved[g]
    queue = boxes.area[g] / cost.kv_tokens * step_seconds(cost, boxes, g, 0)
    if at >= boxes.tail[g] or boxes.running[g] == 0:
        return queue
    request = boxes.queue[g, at % boxes.queue.shape[1]]
    need = requests.prompt[request] + requests.output[request]
    is_full = boxes.running[g] + boxes.reserved[g] >= cost.max_running
    if not is_full and boxes.held[g] + need <= cost.kv_tokens:
        return queue
    return queue + (boxes.ends[g, 0] - boxes.step[g]) * step_seconds(cost, boxes, g, 0)


@compiled
def intercept_of(cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, g: int) -> float:
    """Forecast for an empty prompt, as in the load report: wait, half a step, prompts ahead, one step."""
    step = step_seconds(cost, boxes, g, 0)
    busy = 0.5 * step if boxes.running[g] + boxes.todo[g] > 0 else 0.0
    ahead = boxes.todo[g] * cost.token / boxes.speed[g]
    return wait_for_start(cost, boxes, requests, g) + busy + ahead + step


@compiled
def keeps_tpot(cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, g: int, request: int) -> bool:
    """Rule 2 of the gate's TPOT guard: whether a step with one more sequence stays within the objective."""
    in_engine = boxes.tail[g] - boxes.head[g]
    cells = boxes.cells[g] + requests.prompt[request]
    step = (cost.step + cost.sequence * (boxes.running[g] + in_engine + 1) + cost.cell * cells) / boxes.speed[
        g
    ]
    share = boxes.lost_seconds[g] / boxes.all_seconds[g] if boxes.all_seconds[g] > 0.0 else 0.0
    usable = (1.0 - share) * cost.tpot
    alone = (cost.step + cost.sequence + cost.cell * requests.prompt[request]) / boxes.speed[g]
    return step <= usable or usable < alone


@compiled
def is_late(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, g: int, request: int, now: float
) -> bool:
    """Whether a busy box rejects the request, because it would be late behind the work in the engine."""
    if not cost.has_admission or boxes.running[g] + boxes.todo[g] == 0:
        return False
    own = requests.prompt[request] * cost.token / boxes.speed[g]
    return now + intercept_of(cost, boxes, requests, g) + own > requests.at[request] + cost.ttft


@compiled
def _enter_engine(boxes: BoxArrays, requests: RequestArrays, g: int, request: int, now: float) -> None:
    size = boxes.queue.shape[1]
    requests.uncached[request] = max(1, requests.prompt[request] - _found(boxes, requests, g, request, now))
    boxes.queue[g, boxes.tail[g] % size] = request
    boxes.tail[g] += 1
    boxes.todo[g] += requests.uncached[request]


@compiled
def admit_waiting(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, opened: Connections, g: int, now: float
) -> None:
    """Gives waiting requests to the engine, in order, until one would break the TPOT objective."""
    size = boxes.waiting.shape[1]
    while boxes.waiting_head[g] < boxes.waiting_tail[g]:
        request = boxes.waiting[g, boxes.waiting_head[g] % size]
        if is_late(cost, boxes, requests, g, request, now):
            requests.outcome[request] = _REJECTED
            boxes.area[g] -= memory_time(requests, request)
            opened[g, requests.router[request]] -= 1
        elif boxes.tail[g] - boxes.head[g] >= size or not keeps_tpot(cost, boxes, requests, g, request):
            break
        else:
            _enter_engine(boxes, requests, g, request, now)
        boxes.waiting_head[g] += 1


@compiled
def enqueue(
    cost: BoxCost, boxes: BoxArrays, requests: RequestArrays, heap: EventHeap, opened: Connections, g: int,
    request: int, now: float,
) -> None:  # fmt: skip
    """Gives a request to the box; the step in flight, or that of the run of decode steps, ends first."""
    requests.box[request] = g
    boxes.waiting[g, boxes.waiting_tail[g] % boxes.waiting.shape[1]] = request
    boxes.waiting_tail[g] += 1
    boxes.area[g] += memory_time(requests, request)
    before = boxes.tail[g]
    admit_waiting(cost, boxes, requests, opened, g, now)
    if boxes.tail[g] == before:
        return
    if boxes.run_steps[g] == 0:
        plan_step(cost, boxes, requests, heap, g, now)
    elif boxes.chunk[g] == 0 and boxes.run_steps[g] > 1:
        steps = steps_until(cost, boxes, g, now - boxes.run_start[g])
        if steps < boxes.run_steps[g]:
            boxes.run_steps[g] = steps
            boxes.version[g] += 1
            end = boxes.run_start[g] + span(cost, boxes, g, steps)
            push_event(heap, max(now, end), g, boxes.version[g])
