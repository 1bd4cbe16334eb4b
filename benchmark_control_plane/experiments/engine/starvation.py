"""Measures how long low classes wait in a permanently overloaded engine, against the stated bounds.

    python -m benchmark_control_plane.experiments.engine.starvation [--steps 2000]

vLLM's own scheduler and KV manager on virtual time, in a pool of 64 blocks. Two bounds are stated:

- Ranked orderings: a higher class overtakes only within `priority_head_start_ms`. A request that arrives
  later than that after a low-class request does not start before it (the low one may be preempted again, by
  the head of the waiting queue).
- `srmt`: a request that missed its objective waits `starvation_ms`, and from then on at most for the
  block-steps of the earlier requests that missed, divided by `aged_share` of the blocks.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from backends.vllm.simulation.stepped_engine import SteppedEngine, SteppedEngineSetup

SETUP = SteppedEngineSetup(
    blocks=64, max_model_tokens=512, max_running=16, max_step_tokens=256, batch_time="opt-13b-a100-80g"
)
HEAD_START_S = 2.0
PATIENCE_S = 3.0
AGED_SHARE = 0.3

_NS = 1e9
_LARGE = (400, 100)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of one low-class request, None if it never started, and its bound; in the unit of the study."""

    waited: float | None
    bound: float


def step(engine: SteppedEngine) -> dict[str, int]:
    """Runs one step and returns the new tokens by request; virtual time advances even if nothing ran."""
    before = engine.now_ns
    produced = engine.step()
    if engine.now_ns == before:
        engine.jump(before + 1_000_000)
    return {request_id: tokens for request_id, tokens, _ in produced}


def overtaken(engine: SteppedEngine, ordering: str, steps: int) -> Iterator[Wait]:
    """Waits in seconds under twice the high-class load that the engine sustains.

    The wait of a low-class request is the time from its arrival to the last arrival that started before it.
    """
    engine.restart(tandem={"ordering": ordering, "priority_head_start_ms": HEAD_START_S * 1e3})
    arrived: dict[str, float] = {}
    started: dict[str, int] = {}
    for number in range(steps):
        for is_due, name in ((number % 4 == 0, "high"), (number % 50 == 40, "low")):
            if is_due:
                arrived[f"{name}{number}"] = engine.now_ns / _NS
                metadata = {"priority": int(name == "high"), "tokens": 100, "ttft_ms": 1_000}
                engine.add(f"{name}{number}", 60, 100, extra={"tandem": metadata})
        step(engine)
        for request in engine.core.scheduler.running:
            started.setdefault(request.request_id, number)
    for low, came in arrived.items():
        if low.startswith("low"):
            before = [arrived[other] for other, at in started.items() if at < started.get(low, 0)]
            yield Wait(max([*before, came]) - came if low in started else None, HEAD_START_S)


def aged(engine: SteppedEngine, share: float, steps: int) -> Iterator[Wait]:
    """Waits in steps of large requests among endless small ones, from the end of `starvation_ms` on."""
    prompt, output = _LARGE
    options = {"ordering": "srmt", "starvation_ms": PATIENCE_S * 1e3, "aged_share": share}
    engine.restart(tandem=options)
    objectives: dict[str, Any] = {"ttft_ms": 500, "gap_ms": 500}
    arrived: dict[str, float] = {}
    due: dict[str, int] = {}
    started: dict[str, int] = {}
    for number in range(steps):
        if number % 6 == 0:
            engine.add(f"small{number}", 60, 60, extra={"tandem": {**objectives, "tokens": 60}})
        if number >= 300 and number % 300 in (0, 10, 20):
            arrived[f"large{number}"] = engine.now_ns / _NS
            engine.add(f"large{number}", prompt, output, extra={"tandem": {**objectives, "tokens": output}})
        for name, came in arrived.items():
            if engine.now_ns / _NS >= came + PATIENCE_S:
                due.setdefault(name, number)
        for name in step(engine):
            started.setdefault(name, number)
    # Blocks of a large request times its steps: one per token, and those that compute its prompt.
    prefill = 2 * (prompt // engine.setup.max_step_tokens + 1)
    stay = -(-(prompt + output) // engine.setup.block_tokens) * (output + prefill)
    for before, (name, since) in enumerate(due.items()):
        bound = prefill + before * (1 + stay / (max(share, 1e-9) * engine.setup.blocks))
        if name in started or since + bound < steps:
            yield Wait(started[name] - since if name in started else None, bound)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="starvation", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=2_000, help="simulated engine steps; of srmt three times as many"
    )
    options = parser.parse_args(arguments)
    engine = SteppedEngine(SETUP)
    rows = [(f"{name}, seconds", list(overtaken(engine, name, options.steps))) for name in ("fcfs", "edf")]
    rows.append(("srmt, steps", list(aged(engine, AGED_SHARE, 3 * options.steps))))
    print("ordering        low class  started     nearest to its bound              longest")
    for name, waits in rows:
        known = [(wait.waited, wait.bound) for wait in waits if wait.waited is not None]
        nearest = max(known, key=lambda pair: pair[0] / pair[1], default=(nan, nan))
        longest = max(known, default=(nan, nan))
        print(
            f"{name:15} {len(waits):9} {len(known):8}  {nearest[0]:8.1f} of {nearest[1]:7.1f}  "
            f"{longest[0]:8.1f} of {longest[1]:7.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
