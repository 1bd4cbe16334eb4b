"""Runs a server with real engines for a long time at a constant rate and states what its processes keep.

Chats and embeddings of random sizes arrive at `--load` times the rate that is measured first; a share of the
clients leaves within its answer. Every two seconds the resident memory of the server, its engine and its
embedding worker is read, and the server's descriptors. Passes take memory and return it up to seconds later,
which moves a worker by 200 MB, so that what a process keeps is the least of each five minutes. The slope of
these after `--settle` minutes is fitted by least squares. At the end no lease may be open, and no slope may
exceed 5 MB an hour.

    python -m benchmark_control_plane.experiments.faults.soak
        [--minutes 60] [--settle 10] [--load 0.7] [--leave 0.17] [--results FILE]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark_control_plane.common.process_memory import memory_mb
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm
from benchmark_control_plane.experiments.faults.clients import (
    COMPLETIONS,
    EMBEDDINGS,
    LOST,
    ask,
    new_client,
)
from benchmark_control_plane.experiments.faults.server_under_test import (
    CHAT_MODEL,
    EMBED_MODEL,
    ENGINE,
    WORKER,
    ServerUnderTest,
    started,
    wait_until_ready,
)
from benchmark_control_plane.experiments.faults.trial import settled

MOST_MB_PER_HOUR = 5.0
_SAMPLE_S = 2.0
_WINDOW_MINUTES = 5.0
_PROBE_REQUESTS = 60
_EMBEDDING_SHARE = 0.3
# A client that leaves does so within this time.
_PATIENCE_S = 0.3
_PROCESSES: Mapping[str, str | None] = {"server": None, "engine": ENGINE, "worker": WORKER}


@dataclass(slots=True)
class Samples:
    """Memory in MB by process and descriptors of the server, with the minutes at which they were read."""

    minutes: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _PROCESSES})
    descriptors: list[int] = field(default_factory=list)

    def take(self, server: ServerUnderTest, minutes: float) -> None:
        """Reads all processes. Raises RuntimeError if one has ended."""
        self.minutes.append(round(minutes, 2))
        self.descriptors.append(server.descriptors())
        for name, command in _PROCESSES.items():
            process = server.process.pid if command is None else server.child(command)
            if process is None:
                raise RuntimeError(f"the {name} has ended; see {server.log}")
            self.memory[name].append(round(memory_mb(process), 1))

    def kept(self, name: str) -> dict[float, float]:
        """The least MB of a process in each whole window, by the minute at which the window begins."""
        least: dict[float, float] = {}
        for minute, mb in zip(self.minutes, self.memory[name], strict=True):
            begin = minute // _WINDOW_MINUTES * _WINDOW_MINUTES
            least[begin] = min(mb, least.get(begin, mb))
        return {begin: mb for begin, mb in least.items() if begin + _WINDOW_MINUTES <= self.minutes[-1] + 0.1}

    def slope(self, name: str, settle: float) -> float:
        """MB an hour that a process keeps more, from `settle` minutes on."""
        found = {begin: mb for begin, mb in self.kept(name).items() if begin >= settle}
        return round(float(np.polyfit(np.array([*found]) / 60, [*found.values()], 1)[0]), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing is kept, 1 if something is."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--leave", type=float, default=0.17)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), is_real=True) as server:
        wait_until_ready(server)
        report = asyncio.run(soak(server, options))
    write_or_print(options.results, report)
    grows = max(report["slopes_mb_per_hour"].values()) > MOST_MB_PER_HOUR
    return int(grows or any(report[key] for key in ("held_bytes", "open_requests", "lost")))


async def soak(server: ServerUnderTest, options: argparse.Namespace) -> dict[str, Any]:
    """Loads the server and returns the report."""
    draw, endings, samples = random.Random(0), Counter[str](), Samples()
    async with new_client(server) as http:
        rate = options.load * await _sustainable(http, draw)
        begin, sending = time.monotonic(), set[asyncio.Task[None]]()
        sampling = asyncio.create_task(_sample(server, samples, begin))
        due = begin
        while (now := time.monotonic()) < begin + 60 * options.minutes:
            await asyncio.sleep(max(0.0, due - now))
            leaves = draw.random() < options.leave
            sending.add(task := asyncio.create_task(_send(http, draw, endings, leaves=leaves)))
            task.add_done_callback(sending.discard)
            due += draw.expovariate(rate)
        await asyncio.gather(*sending)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    held, opened = await settled(server)
    return {
        "minutes": options.minutes,
        "rate": round(rate, 2),
        "endings": dict(endings),
        "lost": sum(n for how, n in endings.items() if how.startswith(LOST)),
        "held_bytes": held,
        "open_requests": opened,
        "slopes_mb_per_hour": {name: samples.slope(name, options.settle) for name in _PROCESSES},
        "kept_mb": {name: list(samples.kept(name).values()) for name in _PROCESSES},
        "most_mb": {name: max(found) for name, found in samples.memory.items()},
        "descriptors": [samples.descriptors[0], samples.descriptors[-1]],
    }


async def _sample(server: ServerUnderTest, samples: Samples, begin: float) -> None:
    while True:
        samples.take(server, (time.monotonic() - begin) / 60)
        await asyncio.sleep(_SAMPLE_S)


def _body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    if draw.random() < _EMBEDDING_SHARE:
        words = [["memory"] * draw.randrange(2, 120) for _ in range(draw.randrange(1, 16))]
        return EMBEDDINGS, {"model": EMBED_MODEL, "input": [" ".join(each) for each in words]}
    prompt, tokens = "x" * draw.randrange(20, 300), draw.randrange(8, 100)
    body = {"model": CHAT_MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return COMPLETIONS, body


async def _sustainable(http: httpx.AsyncClient, draw: random.Random) -> float:
    """Requests per second with enough requests to fill every batch."""
    rate = 0.0
    for _ in range(2):  # the first round is the warm-up
        begin = time.monotonic()
        await asyncio.gather(*(ask(http, *_body(draw), "load") for _ in range(_PROBE_REQUESTS)))
        rate = _PROBE_REQUESTS / (time.monotonic() - begin)
    return rate


async def _send(http: httpx.AsyncClient, draw: random.Random, endings: Counter[str], *, leaves: bool) -> None:
    asking = ask(http, *_body(draw), "load")
    if not leaves:
        endings[await asking] += 1
        return
    try:
        async with asyncio.timeout(draw.uniform(0, _PATIENCE_S)):
            endings[await asking] += 1
    except TimeoutError:
        endings["left"] += 1


if __name__ == "__main__":
    sys.exit(main())
