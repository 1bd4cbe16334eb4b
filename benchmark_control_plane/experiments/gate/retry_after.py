"""Are those who wait as told then let in? Bursts on the simulator; whoever is turned away returns once.

    python -m benchmark_control_plane.experiments.gate.retry_after

Promised first tokens, memory for some thirty requests, bursty arrivals (coefficient of variation 4) at
parts of what the machine carries. Virtual time, so the same figures on any machine.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from backends.cost_models.step_time import affine, in_turn, llm_only
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.simulator.simulation import (
    Machine,
    SimulatedRequest,
    arrival_times,
    engines,
    started,
)
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import to_seconds
from controlplane.core.generation import Sampling
from controlplane.core.request import Request
from controlplane.service.jobs import Caller, RequestHints
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

_MACHINE = Machine(
    in_turn(llm_only(affine(0.02, 1e-4, 2e-4, 5e-7))),
    kv_bytes=512 * 16 * 1024, max_model_tokens=1_024, max_running=64, step_tokens=512,
)  # fmt: skip
_SECTIONS = {"classes": {"chat": {"ttft_ms": 1_000, "default": True}}}
_COUNT = 600


@dataclass(frozen=True, slots=True)
class Told:
    wait: float
    then_admitted: bool


def returns(rate: float, seed: int, count: int = _COUNT) -> dict[str, Any]:
    told = run(_course(rate, seed, count))
    return {
        "rate": rate,
        "seed": seed,
        "requests": count,
        "turned_away": len(told),
        "then_admitted": sum(one.then_admitted for one in told),
        "median_wait_s": median(one.wait for one in told) if told else None,
        "longest_wait_s": max((one.wait for one in told), default=None),
    }


async def _course(rate: float, seed: int, count: int) -> list[Told]:
    rng = np.random.default_rng(seed)
    asks = []
    for at in arrival_times(rng, rate, count, variation=4.0):
        output = int(min(400, max(1, rng.lognormal(4.0, 0.8))))
        asks.append(SimulatedRequest(at, int(rng.integers(20, 300)), output, 512, "chat"))

    def length(request: Request) -> int:
        return asks[int(request.id.partition("-")[0])].output_tokens

    generator, embedder = engines(_MACHINE, length)
    async with started(generator, embedder, _MACHINE, _SECTIONS) as service:
        found = await asyncio.gather(*(_client(service, n, one) for n, one in enumerate(asks)))
    return [told for told in found if told is not None]


async def _client(service: Service, number: int, one: SimulatedRequest) -> Told | None:
    """None if it was let in at first."""
    await asyncio.sleep(one.at)
    try:
        await _asked(service, number, one)
    except Rejected as rejected:
        after = rejected.reject.retry_after
        if after is None:
            return None
        # A client is told whole milliseconds, rounded up.
        wait = to_seconds(after) + 0.001
        await asyncio.sleep(wait)
        try:
            await _asked(service, number, one)
        except Rejected:
            return Told(wait, then_admitted=False)
        return Told(wait, then_admitted=True)
    return None


async def _asked(service: Service, number: int, one: SimulatedRequest) -> None:
    limit = one.max_tokens or one.output_tokens
    job = await service.intake.completion(
        str(number), Caller("simulated"), "simulated", range(one.prompt_tokens), max_tokens=limit,
        sampling=Sampling(max_tokens=limit), hints=RequestHints(),
    )  # fmt: skip
    answer = await service.gate.generate(job)
    async for _ in answer:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.gate.retry_after", description=__doc__
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add_results(parser)
    options = parser.parse_args(arguments)
    found = []
    for rate in options.rates:
        for seed in options.seeds:
            found.append(returns(rate, seed))
            print(json.dumps(found[-1]), flush=True)
    admitted, away = (sum(run[key] for run in found) for key in ("then_admitted", "turned_away"))
    print(f"then admitted, of all turned away: {admitted} of {away}")
    write_or_print(options.results, {"runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
