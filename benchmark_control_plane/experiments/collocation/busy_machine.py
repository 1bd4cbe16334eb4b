"""Measures the latency of one short embedding query while other programs keep every core busy.

    python -m benchmark_control_plane.experiments.collocation.busy_machine
        [--model tandem/minilm] [--queries 5] [--words 10] [--deadline-ms 1000] > RESULT.json

The embedding worker may use the idle class (`idle_cpu_priority`). Rows: `idle class only` never leaves it, as
under `SCHED_IDLE` without a gate; in the others a gate reports whether a generation runs and the query states
a deadline or none. Times are in milliseconds; a query that takes longer than a minute counts as a minute.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from backends.embedding.client import WorkerEmbedder
from benchmark_control_plane.common.servers import cpu_seconds
from controlplane.core.clock import Duration, Instant, after, milliseconds
from controlplane.core.ports import PauseCost
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

_LONGEST_SECONDS = 60.0
_CLASS = ServiceClass("query", Slo(), priority=1, sheddable=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tandem/minilm")
    parser.add_argument("--queries", type=int, default=5)
    parser.add_argument("--words", type=int, default=10)
    parser.add_argument("--deadline-ms", type=float, default=1_000.0)
    report = asyncio.run(_measure(parser.parse_args(arguments)))
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


def _free(pauses: Sequence[float]) -> Sequence[float]:
    return [0.0] * len(pauses)


async def _measure(options: argparse.Namespace) -> dict[str, object]:
    deadline = milliseconds(options.deadline_ms)
    rows: list[tuple[str, bool, Callable[[], PauseCost | None] | None, Duration | None]] = [
        ("normal class", False, None, None),
        ("generation runs, with a deadline", True, lambda: _free, deadline),
        ("generation runs, without a deadline", True, lambda: _free, None),
        ("no generation runs", True, lambda: None, None),
        ("idle class only", True, None, deadline),
    ]
    found: dict[str, object] = {"cores": os.cpu_count(), "deadline_ms": options.deadline_ms}
    for name, is_idle, pause_cost, due in rows:
        embedder = WorkerEmbedder(options.model, threads=1, idle_cpu_priority=is_idle)
        embedder.pause_cost = pause_cost
        await embedder.start()
        try:
            with _busy_cores():
                took = [await _query(embedder, options.words, n, due) for n in range(options.queries)]
        finally:
            await embedder.stop()
        found[name] = {"median_ms": statistics.median(took), "max_ms": max(took)}
        print(name, found[name], file=sys.stderr)
    return found


async def _query(embedder: WorkerEmbedder, words: int, number: int, due: Duration | None) -> float:
    tokens = await embedder.tokenize([" ".join(["word"] * words)])
    started = Instant(time.monotonic_ns())
    request = Request(
        f"q{number}",
        Kind.EMBED,
        embedder.model,
        "measurement",
        _CLASS,
        _CLASS.slo,
        started,
        len(tokens[0]),
        0,
    )
    call = embedder.embed(request, tokens, deadline=None if due is None else after(started, due))
    try:
        await asyncio.wait_for(call, _LONGEST_SECONDS)
    except TimeoutError:
        return 1_000 * _LONGEST_SECONDS
    return (time.monotonic_ns() - started) / 1e6


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Runs one process with an endless loop for each core."""
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=_loop, daemon=True) for _ in range(os.cpu_count() or 1)]
    for loop in loops:
        loop.start()
    # A loop has taken its core once it has had CPU time.
    while any(cpu_seconds(loop.pid or 0) < 0.2 for loop in loops):
        time.sleep(0.05)
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _loop() -> None:
    while True:
        pass


if __name__ == "__main__":
    raise SystemExit(main())
