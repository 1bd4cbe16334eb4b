"""Measures how long a cancelled request keeps its lease: from the client's disconnect to no byte held.

The server of configs/dev.yaml, one request at a time: a generation is left after its first event, an
embedding or rerank request once it holds a lease. `/metrics` is read without a pause until nothing is held,
so the figures include one read of it.

    python -m benchmark_control_plane.experiments.gate.cancellation [--rounds 20] [--results FILE]
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm, serving, tandem_server

_CONFIG = Path(__file__).parents[3] / "configs" / "dev.yaml"
_LIMIT_MS = 100.0
_HI = [{"role": "user", "content": "Hello"}]
_CHAT = {"model": "tiny-llama", "messages": _HI, "max_tokens": 1500, "stream": True}
_LONG = "A queue forms where arrivals outpace service. " * 20
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", _CHAT | {"ignore_eos": True}),
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


async def measure(url: str, rounds: int) -> dict[str, Any]:
    """Median and longest time in milliseconds by kind of request, and the aborts that the server counted."""
    took: dict[str, list[float]] = {name: [] for name in _REQUESTS}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for name, (path, body) in _REQUESTS.items():
            # The first answer of a model includes its warm-up.
            for _ in range(rounds + 1):
                took[name].append(await _cancelled(http, path, body))
        aborted = await _metric(http, "tandem_requests_total", 'outcome="aborted"')
    found = {
        name: {"median_ms": statistics.median(ms[1:]), "max_ms": max(ms[1:])} for name, ms in took.items()
    }
    longest = max(one["max_ms"] for one in found.values())
    return {"requests": found, "aborted": aborted, "all_within_100_ms": longest <= _LIMIT_MS}


async def _cancelled(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> float:
    """Milliseconds from the disconnect until no lease is open."""
    first = asyncio.Event()

    async def ask() -> None:
        async with http.stream("POST", path, json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                first.set()
                await asyncio.Event().wait()

    asking = asyncio.create_task(ask())
    while not first.is_set() and await _held(http) == 0:
        if asking.done():
            raise RuntimeError(f"{path} ended before it was cancelled: {asking.exception()}")
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
