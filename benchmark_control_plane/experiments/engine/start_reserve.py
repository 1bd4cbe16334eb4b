"""Measures whether blocks reserved for the highest class earn anything inside the engine.

    python -m benchmark_control_plane.experiments.engine.start_reserve

vLLM's own scheduler and KV manager on virtual time, bound by KV blocks. A steady load of a low class shares
the engine with bursts of a high one. A reserve of R blocks is a lower start ceiling for the low class: its
requests start only while R blocks stay free. `exact` keeps it in the second before each burst, as a forecast
without error would, `always` all the time. Bursts come every 5 s or at random, 5 s apart in the mean. Prints
the attainment per class, in percent, after the first 30 s.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup
from controlplane.policy.engine.interface import EngineView, StepPlan

SETUP = SteppedEngineSetup(
    blocks=256, max_model_tokens=512, max_running=64, max_step_tokens=512, batch_time="opt-13b-a100-80g"
)
_NS = 1e9
_SECONDS, _FROM = 80.0, 30.0
_BURST_EVERY_S, _BURST = 5.0, 16
_AHEAD_S = 1.0
_HIGH = (100, 60)
# Requests per second of the low class alone that fill the blocks.
_LOW_CAPACITY = 4.0
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "high": {"priority": 10, "ttft_ms": 400, "tpot_ms": 100},
    "low": {"priority": 1, "ttft_ms": 4_000, "tpot_ms": 100},
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table: the reserve as a share of the blocks, and when it applies."""

    reserve: float
    when: str


ARMS = (Arm(0.0, "never"), Arm(0.1, "always"), Arm(0.2, "always"), Arm(0.3, "exact"))


def bursts(seed: int, *, is_random: bool) -> list[float]:
    """Seconds at which bursts begin."""
    if not is_random:
        return [_BURST_EVERY_S * number for number in range(1, int(_SECONDS / _BURST_EVERY_S))]
    random, found = Random(seed), [0.0]
    while found[-1] < _SECONDS:
        found.append(found[-1] + random.expovariate(1 / _BURST_EVERY_S))
    return found[1:-1]


def arrivals(load: float, seed: int, begins: Sequence[float]) -> list[tuple[float, str, int, int]]:
    """Arrival second, class, prompt and output tokens, in order of time."""
    random = Random(seed)
    found = []
    at = random.expovariate(load * _LOW_CAPACITY)
    while at < _SECONDS:
        found.append((at, "low", random.randint(50, 250), random.randint(50, 250)))
        at += random.expovariate(load * _LOW_CAPACITY)
    for begin in begins:
        found += [(begin + random.uniform(0, 0.2), "high", *_HIGH) for _ in range(_BURST)]
    return sorted(found)


def reserve_blocks(plan: StepPlan, view: EngineView, reserve: int) -> list[Any]:
    """The plan's offer without low-class requests that would leave fewer than `reserve` blocks free."""
    room = view.free + sum(state.held for state in plan.preempt)
    is_idle = len(view.running) == len(plan.preempt)
    kept: list[Any] = []
    for state in plan.offer:
        need = view.need(state)
        least = reserve if state.priority < _OBJECTIVES["high"]["priority"] else 0
        if room - need >= least or (is_idle and not kept):
            kept.append(state)
            room -= need
    return kept


class ReservingPolicy:
    """Filters the offers of an engine policy by the reserve that applies now."""

    def __init__(self, inner: Any, reserve_at: Callable[[EngineView], int]) -> None:
        self._inner, self._reserve_at = inner, reserve_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan(self, view: EngineView) -> StepPlan:
        """The plan of the inner policy, its offer cut to the reserve."""
        plan: StepPlan = self._inner.plan(view)
        if reserve := self._reserve_at(view):
            plan.offer = reserve_blocks(plan, view, reserve)
        return plan


def kept(
    engine: SteppedEngine, ordering: str, load: float, arm: Arm, seed: int, *, is_random: bool
) -> dict[str, float]:
    """Share of requests of each class that met both objectives."""
    scheduler = engine.restart(tandem={"ordering": ordering})
    blocks = int(arm.reserve * SETUP.blocks)

    begins = bursts(seed, is_random=is_random)

    def reserve_at(view: EngineView) -> int:
        second = view.now / _NS
        if arm.when == "exact":
            return blocks if any(0 < begin - second <= _AHEAD_S for begin in begins) else 0
        return blocks

    scheduler.engine_policy = ReservingPolicy(scheduler.engine_policy, reserve_at)
    coming = arrivals(load, seed, begins)
    came = {f"{name}{number}": at for number, (at, name, *_) in enumerate(coming)}
    first: dict[str, float] = {}
    done: dict[str, int] = {}
    met = {"high": 0, "low": 0}
    number = 0
    while number < len(coming) or engine.core.scheduler.requests:
        while number < len(coming) and coming[number][0] <= engine.now_ns / _NS:
            _, name, prompt, output = coming[number]
            engine.add(
                f"{name}{number}", prompt, output, extra={"tandem": {**_OBJECTIVES[name], "tokens": output}}
            )
            number += 1
        before = engine.now_ns
        for request_id, tokens, is_finished in engine.step():
            now = engine.now_ns / _NS
            first.setdefault(request_id, now)
            done[request_id] = done.get(request_id, 0) + tokens
            if is_finished:
                name = request_id.rstrip("0123456789")
                objective = _OBJECTIVES[name]
                per_token = (now - first[request_id]) / max(1, done[request_id] - 1)
                is_timely = first[request_id] - came[request_id] <= objective["ttft_ms"] / 1e3
                met[name] += (
                    came[request_id] >= _FROM and is_timely and per_token <= objective["tpot_ms"] / 1e3
                )
        if engine.now_ns == before:
            engine.jump(before + 1_000_000)
    assert not scheduler.malformed
    counted = [request_id.rstrip("0123456789") for request_id, at in came.items() if at >= _FROM]
    return {name: met[name] / counted.count(name) for name in met}


def main(arguments: Sequence[str]) -> None:
    """Prints one row per ordering, load and arm: the mean of the seeds."""
    seeds = range(int(arguments[0]) if arguments else 3)
    engine = SteppedEngine(SETUP)
    print("ordering  load  bursts    reserve  when      high    low")
    cases = product((0.5, 0.6), ("edf", "srmt"), (False, True), ARMS)
    for load, ordering, is_random, arm in cases:
        rows = [kept(engine, ordering, load, arm, seed, is_random=is_random) for seed in seeds]
        high, low = (100 * sum(row[name] for row in rows) / len(rows) for name in ("high", "low"))
        kind, reserve = "random" if is_random else "periodic", f"{arm.reserve:7.2f}  {arm.when:8}"
        print(f"{ordering:8}  {load:4.1f}  {kind:8}  {reserve}  {high:5.1f}  {low:5.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
