"""Measures what Ray Serve adds to a box, and what a second box adds; the boxes have simulated engines.

`latency`: one request at a time, to a fleet of one box and to a box without Ray, in turns. `capacity`: fleets
of several sizes at Poisson arrivals of several rates; the rate at 90 % attainment is interpolated. Four boxes
near their limit may need more than two cores; answers of 16 `--tokens` halve the rate of that limit.

    python -m benchmark_control_plane.experiments.fleet.ray_overhead latency [--requests N] [--results FILE]
    python -m benchmark_control_plane.experiments.fleet.ray_overhead capacity [--boxes N ...] [--rates R ...]
        [--tokens N] [--results FILE]
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.fleet.ray_cluster import listed_boxes
from benchmark_control_plane.experiments.fleet.simulated_boxes import (
    MAX_RUNNING,
    STEP_SECONDS,
    serving_box,
    serving_fleet,
)
from benchmark_control_plane.experiments.fleet.streaming_client import (
    Ending,
    StreamedExchange,
    client,
    exchange,
    offer,
)

_ATTAINMENT = 0.9
_WARM_UP, _START_SECONDS = 5, 300
_ADMIN_KEY = "overhead"
_SECTIONS = {"server": {"admin_key_sha256": sha256(_ADMIN_KEY.encode()).hexdigest()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("latency", "capacity"))
    parser.add_argument("--requests", type=int, default=100, help="of each server, or at each rate")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10, 12, 14, 16, 18], help="per second and box"
    )
    parser.add_argument("--boxes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()

    def command() -> dict[str, object]:
        if options.requests < 20:
            raise BadInput(f"--requests {options.requests}: must be at least 20")
        with tempfile.TemporaryDirectory() as folder:
            measure = _latency if options.what == "latency" else _capacity
            return measure(Path(folder), options)

    return print_json(command, options.results)


def _latency(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Medians in milliseconds, and their differences, which the criteria bound."""
    (folder / "alone").mkdir()
    with serving_fleet(folder, 1) as fleet, serving_box(folder / "alone") as box:
        seen = asyncio.run(_in_turns({"ray": fleet.url, "box": box.url}, options))
    medians = {
        name: {
            "ttft_ms": 1e3 * statistics.median(each.ttft for each in exchanges),
            "chunk_delay_ms": 1e3
            * statistics.median(delay for each in exchanges for delay in each.delays[1:]),
        }
        for name, exchanges in seen.items()
    }
    above = {key: medians["ray"][key] - medians["box"][key] for key in medians["ray"]}
    return {**_conditions(options), **medians, "ray_above_box": above}


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    engine = f"simulated engine, steps of {1e3 * STEP_SECONDS[0]:g} ms, {MAX_RUNNING} answers of "
    return {"engine": f"{engine}{options.tokens} tokens at a time", "requests": options.requests}


async def _in_turns(urls: dict[str, str], options: argparse.Namespace) -> dict[str, list[StreamedExchange]]:
    seen: dict[str, list[StreamedExchange]] = {name: [] for name in urls}
    async with client() as http:
        for number in range(options.requests + _WARM_UP):
            for name, url in urls.items():
                found = await exchange(http, url, tokens=options.tokens)
                if found.ending is not Ending.COMPLETE:
                    raise RuntimeError(
                        f"{name}: request {number} ended {found.ending.value}, status {found.status}"
                    )
                if number >= _WARM_UP:
                    seen[name].append(found)
    return seen


def _capacity(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = _conditions(options)
    at_90: dict[int, float | None] = {}
    for boxes in options.boxes:
        own = folder / str(boxes)
        own.mkdir()
        with serving_fleet(own, boxes, sections=_SECTIONS) as fleet:
            asyncio.run(_settle(fleet.url, boxes, options))
            rows = [asyncio.run(_attainment(fleet.url, boxes, rate, options)) for rate in options.rates]
        at_90[boxes] = _rate_at(_ATTAINMENT, [(row["rate_per_box"], row["attainment"]) for row in rows])
        found[f"{boxes} boxes"] = rows
    first, last = at_90[options.boxes[0]], at_90[options.boxes[-1]]
    found["rate_per_box_at_90"] = at_90
    if first is not None and last is not None:
        found["times_the_first"] = last * options.boxes[-1] / (first * options.boxes[0])
    return found


async def _settle(url: str, boxes: int, options: argparse.Namespace) -> None:
    """Waits until every box reports, and sends a few requests that are not counted.

    A fleet is ready with its first box, and would be offered the first rate while the others start.
    """
    async with client() as http:
        for _ in range(_START_SECONDS):
            listed = await listed_boxes(http, url, {"authorization": f"Bearer {_ADMIN_KEY}"}) or []
            if sum(bool(box["report"]) for box in listed) == boxes:
                break
            await asyncio.sleep(1.0)
        else:
            raise RuntimeError(f"not all of {boxes} boxes report within {_START_SECONDS} s")
    count = 2 * _WARM_UP * boxes
    await offer(url, rate=2 * boxes, count=count, tokens=options.tokens, seed=options.seed)


async def _attainment(url: str, boxes: int, rate: float, options: argparse.Namespace) -> dict[str, float]:
    # Arrivals at one rate are independent of those at another.
    seed = hash((options.seed, rate))
    count = options.requests * boxes
    exchanges = await offer(url, rate=rate * boxes, count=count, tokens=options.tokens, seed=seed)
    return {
        "rate_per_box": rate,
        "attainment": statistics.mean(each.is_met for each in exchanges),
        "refused": sum(each.ending is Ending.REFUSED for each in exchanges),
        "lost": sum(each.ending in (Ending.CUT, Ending.UNANSWERED) for each in exchanges),
    }


def _rate_at(attainment: float, rows: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which attainment falls below this value, interpolated; None if it does not."""
    for (rate, above), (next_rate, below) in pairwise(rows):
        if above >= attainment > below:
            return float(np.interp(attainment, [below, above], [next_rate, rate]))
    return None


if __name__ == "__main__":
    raise SystemExit(main())
