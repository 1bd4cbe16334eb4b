"""Measures the error of the TTFT forecast of the real service with vLLM on the CPU, under Poisson loads.

    python -m benchmark_control_plane.experiments.prediction.ttft_forecast

Eight slots, prompts of 16 to 600 tokens, outputs of 8 to 96, at parts of the measured saturation rate; the
first requests of each load are the warm-up. The forecast at dispatch is compared with the time from arrival
to the first token at the gate. `known`: outputs end at their limit and the requests state it. `predicted`:
outputs may end earlier, and their length is forecast. Takes about three minutes; needs an idle machine.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

from benchmark_control_plane.common.results_file import add_results, write_or_print
from controlplane.config import parse
from controlplane.core.clock import Duration, between, to_seconds
from controlplane.core.generation import Sampling
from controlplane.service.bootstrap import assemble
from controlplane.service.request_jobs import Caller, RequestOrigin
from controlplane.service.service import Service

MODEL = "tiny-llama"
_CONFIG = {
    "models": {
        "chat": {
            "model": f"tandem/{MODEL}",
            "name": MODEL,
            "engine": {
                "max_model_len": 1024, "max_num_seqs": 8, "block_size": 32, "dtype": "bfloat16",
                "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20,
            },
        }
    },
    "pool": {"memory": "2GiB"},
}  # fmt: skip
_WARM_UP = 100
_FULL = 150


@dataclass(frozen=True, slots=True)
class ForecastPairs:
    """Seconds from arrival to the first token: forecast median, forecast 0.9 quantile, and measured."""

    median: float
    upper: float
    true: float
    waited: bool


async def measure(loads: Sequence[float], requests: int, seed: int) -> dict[str, Any]:
    """The saturation rate, then the errors at parts of it, with known and with forecast lengths."""
    service = assemble(parse(_CONFIG))
    await service.start()
    try:
        random = Random(seed)
        await _send_all(service, random, _WARM_UP, rate=None)
        start = perf_counter()
        await _send_all(service, random, _FULL, rate=None)
        full = _FULL / (perf_counter() - start)
        found: dict[str, Any] = {"carried_rps": full}
        for lengths in ("known", "predicted"):
            found[lengths] = {}
            for load in loads:
                offered = _send_all(
                    service, random, _WARM_UP + requests, rate=load * full, fixed=lengths == "known"
                )
                scores = _scores((await offered)[_WARM_UP:])
                found[lengths][f"{load:g}"] = scores
                print(f"lengths {lengths}, {load:g} of {full:.1f}/s: {json.dumps(scores)}", flush=True)
        return found
    finally:
        await service.stop()


async def _send_all(
    service: Service, random: Random, count: int, *, rate: float | None, fixed: bool = False
) -> list[ForecastPairs]:
    """Sends `count` requests, Poisson at `rate` per second or all at once."""
    tasks, loop = [], asyncio.get_running_loop()
    at = loop.time()
    for _ in range(count):
        if rate is not None:
            at += random.expovariate(rate)
            await asyncio.sleep(max(0.0, at - loop.time()))
        prompt = [random.randint(10, 1_000) for _ in range(random.randint(16, 600))]
        tasks.append(asyncio.create_task(_send(service, prompt, random.randint(8, 96), fixed=fixed)))
    return [pair for pair in await asyncio.gather(*tasks) if pair is not None]


async def _send(service: Service, prompt: list[int], tokens: int, *, fixed: bool) -> ForecastPairs | None:
    """Sends one request; None if the service had no forecast yet."""
    # The tiny model hardly ever samples its end token, so that both ways cost the engine the same.
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=fixed)
    origin = RequestOrigin("ttft", Caller("benchmark"))
    job = await service.intake.completion(origin, MODEL, prompt, max_tokens=tokens, sampling=sampling)
    stream = await service.gate.generate(job)
    ticket = stream.ticket
    starting = ticket.engine_start
    async with aclosing(stream):
        async for _ in stream:
            pass
    timeline = ticket.timeline
    if starting is None or timeline.ttft is None:
        return None
    waited = between(timeline.arrival, starting.at)
    return ForecastPairs(
        to_seconds(Duration(waited + starting.forecast.median)),
        to_seconds(Duration(waited + starting.forecast.upper)),
        to_seconds(timeline.ttft),
        starting.ahead.waits,
    )


def _scores(seen: Sequence[ForecastPairs]) -> dict[str, float]:
    return {
        "requests": len(seen),
        "median_ttft_ms": 1e3 * median(s.true for s in seen),
        "median_error": median(abs(s.median - s.true) / s.true for s in seen),
        "coverage_90": mean(s.true <= s.upper for s in seen),
        "waited_for_a_slot": mean(s.waited for s in seen),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.prediction.ttft_forecast", description=__doc__
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.95])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    add_results(parser)
    options = parser.parse_args(arguments)
    found = asyncio.run(measure(options.loads, options.requests, options.seed))
    write_or_print(options.results, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
