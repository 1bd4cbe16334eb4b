"""Measures what a day of traffic leaves in memory: the service with its live feed, in virtual time.

Chats, batch jobs and embedding calls arrive with exponential gaps, and a reader of the dashboard asks each
second for what is new. After each virtual hour the Python objects that a full garbage collection leaves and
the resident memory of the process are noted. The slope is that of a line through the hours after
`--settling`, by which the histories and calibrations of fixed size are full.

    python -m benchmark_control_plane.experiments.gate.virtual_day [--hours 24] [--rate 2]
"""

import argparse
import asyncio
import gc
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import linear_regression

import orjson

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.simulated.generator import SimulatedGenerator
from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.process_memory import memory_mb
from benchmark_control_plane.common.results_file import add_results
from benchmark_control_plane.simulator.distinct_prompts import prompt_ids
from benchmark_control_plane.simulator.simulated_machine import Machine, engines
from benchmark_control_plane.simulator.simulation import config_of, started
from benchmark_control_plane.simulator.token_reader import read_to_end
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.generation import Sampling
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.service import Service
from controlplane.service.ticket import Rejected

_HOUR = 3600.0
_MACHINE = Machine(
    sequential(llm_only(affine(0.02, 1e-4, 4e-4, 1e-7)), embedding_line(0.005, 5e-5)),
    kv_bytes=900 * 16 * 1_024, max_model_tokens=1_024, max_running=32, step_tokens=256,
)  # fmt: skip
_CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 400, "tpot_ms": 60},
    "standard": {"priority": 1, "default": True, "sheddable": False, "ttft_ms": 4_000},
}
_LONGEST = 200


@dataclass(slots=True)
class _Day:
    """What was seen, one entry for each hour, and how the requests ended."""

    objects: list[int] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    """Output tokens of the answers under way, by the number of the request."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24, help="virtual hours")
    parser.add_argument("--settling", type=int, default=4, help="hours before those of the slope")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if options.settling < 0 or options.hours < options.settling + 2:
            raise BadInput(f"--hours {options.hours}: must be at least 2 more than --settling")
        if options.rate <= 0:
            raise BadInput(f"--rate {options.rate}: must be above 0")
        day = run(_day(options.hours, options.rate))
        settled = slice(options.settling, None)
        return {
            "hours": options.hours,
            "settling": options.settling,
            "rate": options.rate,
            "requests": day.ended.total(),
            "outcomes": dict(sorted(day.ended.items())),
            "objects": day.objects,
            "resident_mb": [round(each, 1) for each in day.resident_mb],
            "objects_per_hour": _slope(day.objects[settled]),
            "resident_mb_per_hour": _slope(day.resident_mb[settled]),
        }

    return print_json(command, options.results)


def _slope(values: Sequence[float]) -> float:
    return round(linear_regression(range(len(values)), values).slope, 3)


async def _day(hours: int, rate: float) -> _Day:
    day = _Day()
    config = config_of({"classes": _CLASSES}, has_pool=False)
    generator, embedder = engines(
        _MACHINE, lambda request: day.lengths[request.id.partition("-")[0]], config, lambda *step: None
    )
    async with started(generator, embedder, _MACHINE, config) as service:
        reader = asyncio.create_task(_read_feed(service))
        for hour in range(hours):
            await _hour(service, generator, day, Random(hour), rate)
            gc.collect()
            day.objects.append(len(gc.get_objects()))
            day.resident_mb.append(memory_mb(os.getpid()))
        reader.cancel()
    return day


async def _read_feed(service: Service) -> None:
    """An open dashboard: takes a sample each second, and reads what is new."""
    seen = 0
    while True:
        service.live.sample()
        seen = orjson.loads(service.live.since(seen, "day"))["next"]
        await asyncio.sleep(1.0)


async def _hour(
    service: Service, generator: SimulatedGenerator, day: _Day, random: Random, rate: float
) -> None:
    """Sends the requests of an hour, and returns when all have ended."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _HOUR
    async with asyncio.TaskGroup() as clients:
        while (gap := random.expovariate(rate)) < until - loop.time():
            await asyncio.sleep(gap)
            clients.create_task(_client(service, generator, day, random))
        await asyncio.sleep(until - loop.time())


async def _client(service: Service, generator: SimulatedGenerator, day: _Day, random: Random) -> None:
    """Sends one request: of four, two are interactive chats, one is a batch job and one embeds passages."""
    number = day.sent = day.sent + 1
    kind = random.randrange(4)
    hints = RequestHints("standard" if kind == 2 else "interactive")
    origin = RequestOrigin(str(number), Caller("day"), hints)
    try:
        if kind == 3:
            inputs = [range(random.randint(5, 200)) for _ in range(3)]
            job = await service.intake.embeddings(origin, "simulated-embedding", inputs)
            ticket = (await service.gate.embed(job)).ticket
        else:
            day.lengths[str(number)] = random.randint(1, _LONGEST)
            prompt = prompt_ids(number, random.randint(40, 300), group=number % 5, shared=32)
            chat = await service.intake.completion(
                origin, "simulated", prompt, max_tokens=_LONGEST, sampling=Sampling(_LONGEST)
            )
            answer = await service.gate.generate(chat)
            ticket = answer.ticket
            await read_to_end(generator, chat.request.id, answer)
    except Rejected as rejected:
        day.ended["rejected" if not rejected.is_evicted else "evicted"] += 1
        return
    finally:
        day.lengths.pop(str(number), None)
    day.ended[str(ticket.outcome)] += 1


if __name__ == "__main__":
    raise SystemExit(main())
