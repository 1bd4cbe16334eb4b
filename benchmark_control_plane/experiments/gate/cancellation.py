"""Measures how long a cancelled request keeps its lease: from the client's disconnect to no byte held.

The server of configs/dev.yaml, one request at a time: a generation is left after its first event, an
embedding or rerank request once it holds a lease: by closing the connection of an HTTP client, then by
cancelling the task that awaits a call of AsyncTandem. `/metrics` is read without a pause until nothing is
held, so the figures include one read of it.

    python -m benchmark_control_plane.experiments.gate.cancellation [--rounds 20] [--results FILE]
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm, serving, tandem_server
from controlplane.sdk import AsyncTandem

_CONFIG = Path(__file__).parents[3] / "configs" / "dev.yaml"
_LIMIT_MS = 100.0
_HI = [{"role": "user", "content": "Hello"}]
_CHAT = {"model": "tiny-llama", "messages": _HI, "max_tokens": 1500, "stream": True}
_LONG = "A queue forms where arrivals outpace service. " * 20
_ON = {"ignore_eos": True}
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", _CHAT | _ON),
    "completion": (
        "/v1/completions",
        {"model": "tiny-llama", "prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True},
    ),
    "response": (
        "/v1/responses",
        {"model": "tiny-llama", "input": "Hello", "max_output_tokens": 1500, "stream": True},
    ),
    "message": ("/v1/messages", _CHAT),
    "embeddings": ("/v1/embeddings", {"model": "minilm", "input": [_LONG] * 64}),
    "rerank": ("/v1/rerank", {"model": "tiny-reranker", "query": "Who?", "documents": [_LONG] * 512}),
}


Begin = Callable[[asyncio.Event], Awaitable[object]]
"""Sends a request and sets the event at the first part of its response; ends with the response."""


def _sdk_calls(tandem: AsyncTandem) -> dict[str, Begin]:
    async def stream(first: asyncio.Event) -> None:
        async for _ in tandem.stream("Hello", model="tiny-llama", max_tokens=1500, extra=_ON):
            first.set()

    return {
        "AsyncTandem.stream": stream,
        "AsyncTandem.chat": lambda _: tandem.chat("Hello", model="tiny-llama", max_tokens=1500, extra=_ON),
        "AsyncTandem.embed": lambda _: tandem.embed([_LONG] * 64, model="minilm"),
        "AsyncTandem.rerank": lambda _: tandem.rerank("Who?", [_LONG] * 512, model="tiny-reranker"),
    }


def _http_calls(http: httpx.AsyncClient) -> dict[str, Begin]:
    def of(path: str, body: Mapping[str, Any]) -> Begin:
        async def ask(first: asyncio.Event) -> None:
            async with http.stream("POST", path, json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_bytes():
                    first.set()

        return ask

    return {name: of(path, body) for name, (path, body) in _REQUESTS.items()}


async def measure(url: str, rounds: int) -> dict[str, Any]:
    """Median and longest time in milliseconds by kind of request, and the aborts that the server counted."""
    took: dict[str, list[float]] = {}
    # Other work on the machine and the start of the server, which the figures include.
    load = round(os.getloadavg()[0], 1)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, AsyncTandem(url, timeout=60) as tandem:
        for name, begin in (_http_calls(http) | _sdk_calls(tandem)).items():
            # The first answer of a model includes its warm-up.
            took[name] = [await _cancelled(http, name, begin) for _ in range(rounds + 1)][1:]
        aborted = await _metric(http, "tandem_requests_total", 'outcome="aborted"')
    found = {name: {"median_ms": statistics.median(ms), "max_ms": max(ms)} for name, ms in took.items()}
    longest = max(one["max_ms"] for one in found.values())
    return {
        "rounds": rounds,
        "load_average": load,
        "requests": found,
        "aborted": aborted,
        "all_within_100_ms": longest <= _LIMIT_MS,
    }


async def _cancelled(http: httpx.AsyncClient, name: str, begin: Begin) -> float:
    """Milliseconds from the cancellation until no lease is open."""
    first = asyncio.Event()
    asking = asyncio.ensure_future(begin(first))
    while not first.is_set() and await _held(http) == 0:
        if asking.done():
            raise RuntimeError(f"{name} ended before it was cancelled: {asking.exception()}")
    start = time.perf_counter()
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    while await _held(http) > 0:
        pass
    return 1_000 * (time.perf_counter() - start)


async def _held(http: httpx.AsyncClient) -> float:
    return await _metric(http, ("tandem_held_bytes", "tandem_requests_running"))


async def _metric(http: httpx.AsyncClient, names: str | tuple[str, ...], label: str = "") -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names) and label in line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    config = yaml.safe_load(_CONFIG.read_text(encoding="utf-8"))
    for model in (*config["models"]["embeddings"], *config["models"]["rerankers"]):
        # The figures are those of the server, not of what else runs on this machine.
        model["idle_cpu_priority"] = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(tandem_server(config, folder / "dev.yaml"), folder / "log"))
        report = asyncio.run(measure(server.url, options.rounds))
    write_or_print(options.results, report)
    return 0 if report["all_within_100_ms"] else 1


if __name__ == "__main__":
    sys.exit(main())
