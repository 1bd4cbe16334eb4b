"""Measures how many rejected requests are admitted when they retry once after their Retry-After.

    python -m benchmark_control_plane.experiments.gate.retry_after_accuracy

The live service on the simulated device: a TTFT objective, memory for about thirty requests, bursty arrivals
(coefficient of variation 4) at the rate that the device sustains, 1.5 times and twice that rate.
Virtual time, so the figures are the same on any machine.
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

from backends.cost_models.step_time import affine, llm_only, sequential
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import Machine, engines
from benchmark_control_plane.simulator.simulation import SimulatedRequest, arrival_times, config_of, started
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.clock import to_seconds
from controlplane.core.generation import Sampling
from controlplane.core.request import Request
from controlplane.service.request_jobs import Caller, RequestOrigin
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

_MACHINE = Machine(
    sequential(llm_only(affine(0.02, 1e-4, 2e-4, 5e-7))),
    kv_bytes=512 * 16 * 1024, max_model_tokens=1_024, max_running=64, step_tokens=512,
)  # fmt: skip
_SECTIONS = {"classes": {"chat": {"ttft_ms": 1_000, "default": True}}}
_COUNT = 600


@dataclass(frozen=True, slots=True)
class Retry:
    """One request that was rejected: its Retry-After in seconds, and the decision on its retry."""

    wait: float
    then_admitted: bool


def returns(rate: float, seed: int, count: int = _COUNT) -> dict[str, Any]:
    """One run of `count` requests at `rate` requests per second."""
    retries = run(_retries(rate, seed, count))
    return {
        "rate": rate,
        "seed": seed,
        "requests": count,
        "turned_away": len(retries),
        "then_admitted": sum(retry.then_admitted for retry in retries),
        "median_wait_s": median(retry.wait for retry in retries) if retries else None,
        "longest_wait_s": max((retry.wait for retry in retries), default=None),
    }


async def _retries(rate: float, seed: int, count: int) -> list[Retry]:
    rng = np.random.default_rng(seed)
    requests = []
    for at in arrival_times(rng, rate, count, variation=4.0):
        output = int(min(400, max(1, rng.lognormal(4.0, 0.8))))
        requests.append(SimulatedRequest(at, int(rng.integers(20, 300)), output, 512, "chat"))

    def length(request: Request) -> int:
        return requests[int(request.id.partition("-")[0])].output_tokens

    config = config_of(_SECTIONS, has_pool=_MACHINE.pool_bytes is not None)
    generator, embedder = engines(_MACHINE, length, config)
    async with started(generator, embedder, _MACHINE, config) as service:
        found = await asyncio.gather(*(_client(service, n, request) for n, request in enumerate(requests)))
    return [retry for retry in found if retry is not None]


async def _client(service: Service, number: int, request: SimulatedRequest) -> Retry | None:
    """None if the first attempt was admitted."""
    await asyncio.sleep(request.at)
    try:
        await _generate(service, number, request)
    except Rejected as rejected:
        after = rejected.reject.retry_after
        if after is None:
            return None
        # Retry-After reaches the client in whole milliseconds, rounded up.
        wait = to_seconds(after) + 0.001
        await asyncio.sleep(wait)
        try:
            await _generate(service, number, request)
        except Rejected:
            return Retry(wait, then_admitted=False)
        return Retry(wait, then_admitted=True)
    return None


async def _generate(service: Service, number: int, request: SimulatedRequest) -> None:
    limit = request.max_tokens or request.output_tokens
    prompt = prompt_ids(number, request.prompt_tokens, group=0, shared=0)
    origin, sampling = RequestOrigin(str(number), Caller("simulated")), Sampling(max_tokens=limit)
    job = await service.intake.completion(origin, "simulated", prompt, max_tokens=limit, sampling=sampling)
    stream = await service.gate.generate(job)
    async for _ in stream:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.gate.retry_after_accuracy", description=__doc__
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 12.0, 16.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add_results(parser)
    options = parser.parse_args(arguments)
    found = []
    for rate in options.rates:
        for seed in options.seeds:
            found.append(returns(rate, seed))
            print(json.dumps(found[-1]), flush=True)
    admitted, rejected = (sum(run[key] for run in found) for key in ("then_admitted", "turned_away"))
    print(f"admitted on retry: {admitted} of {rejected} rejected requests")
    write_or_print(options.results, {"runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
