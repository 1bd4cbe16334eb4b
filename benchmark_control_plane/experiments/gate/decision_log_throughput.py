"""Measures the throughput of a saturated server with the decision log, relative to one without.

Two servers with scripted engines, which take no time, run in processes of their own; one writes the log with
its default share of numbers. Clients that send the next request when an answer is complete saturate one of
them at a time, in windows that alternate (A B B A); ratios are taken within a pair of windows. The CPU time
is that of all threads of the server's process. Full segments are small, so that each window compresses its
part.

    python -m benchmark_control_plane.experiments.gate.decision_log_throughput
        [--rounds 15] [--seconds 4] [--tokens 16 128] [--results FILE]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from backends.testing.scripted import ScriptedGenerator, ScriptedRun
from benchmark_control_plane.common.http_client import Address, Connections, connections
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import (
    Server,
    all_serving,
    cpu_seconds,
    free_port,
    interrupt_on_sigterm,
)

_MODEL = "scripted"
# More clients than places, so that requests also wait at the gate.
_CLIENTS, _RUNNING = 24, 16
_PROMPT_CHARACTERS = 400
_KEEP = "4MiB"
_WARMUP_SECONDS = 3.0
_LOGGED, _PLAIN = "logged", "plain"
Window = tuple[float, float]
"""Requests per second, and CPU microseconds of a request."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="decision_log_throughput", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of windows for each number of tokens")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128], help="of an answer")
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "FOLDER"), help=argparse.SUPPRESS)
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        return serve(int(options.serve[0]), options.serve[1])
    interrupt_on_sigterm()
    with _servers() as servers:
        found = {
            str(tokens): _paired(servers, options.rounds, options.seconds, tokens)
            for tokens in options.tokens
        }
    write_or_print(
        options.results,
        {"rounds": options.rounds, "seconds": options.seconds, "clients": _CLIENTS, "by_tokens": found},
    )
    return 0


@contextmanager
def _servers() -> Iterator[dict[str, Server]]:
    """The server without the log and the one with it."""
    module = "benchmark_control_plane.experiments.gate.decision_log_throughput"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        described = []
        for name, log in ((_PLAIN, ""), (_LOGGED, str(folder / "log"))):
            port = free_port()
            command = [sys.executable, "-m", module, "--serve", str(port), log]
            described.append((Server(name, command, port, "/ready"), folder / f"{name}.txt"))
        yield {each.name: each for each in stack.enter_context(all_serving(described))}


def serve(port: int, folder: str) -> int:
    """Serves the scripted engine until a signal, with the log in `folder` unless that is empty."""
    from controlplane.api.graceful_server import host_forever
    from controlplane.config import parse
    from controlplane.service.bootstrap import build_service

    log = {"decision_log": {"dir": folder, "keep": _KEEP}} if folder else {}
    # The clients wait for the event loop as long as it takes; none is shed.
    limits = {"max_queue_delay_ms": 60_000}
    config = parse({"server": {"port": port, "limits": limits}, "models": {"chat": {"model": _MODEL}}, **log})
    generator = _LiveRuns(model=_MODEL, max_running=_RUNNING, has_prefix_cache=True)
    return host_forever(build_service(config, [generator], [], workspace_bytes=0), config)


class _LiveRuns(ScriptedGenerator):
    """Forgets the runs that have ended: it looks at all that it knows for its state."""

    async def _begin(self, run: ScriptedRun) -> None:
        self.runs = self.live
        await super()._begin(run)


def _paired(servers: dict[str, Server], rounds: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Medians without the log, and ratios within the pairs of windows."""
    numbers = count()
    for server in servers.values():
        uvloop.run(_window(server, _WARMUP_SECONDS, tokens, numbers))
    found: dict[str, list[Window]] = {_PLAIN: [], _LOGGED: []}
    for number in range(rounds):
        for name in (_PLAIN, _LOGGED) if number % 2 == 0 else (_LOGGED, _PLAIN):
            found[name].append(uvloop.run(_window(servers[name], seconds, tokens, numbers)))
        print(json.dumps({"tokens": tokens, **{name: each[-1] for name, each in found.items()}}), flush=True)
    return ratios(found[_PLAIN], found[_LOGGED])


def ratios(plain: Sequence[Window], logged: Sequence[Window]) -> dict[str, Any]:
    """Medians without the log, and throughput and CPU time with it relative to that of each pair."""
    pairs = list(zip(plain, logged, strict=True))
    return {
        "plain_rps": round(statistics.median(rate for rate, _ in plain), 1),
        "plain_request_us": round(statistics.median(cost for _, cost in plain), 1),
        "throughput_ratio": _spread([log[0] / without[0] for without, log in pairs], 4),
        "added_us": _spread([log[1] - without[1] for without, log in pairs], 1),
    }


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median and range, and the quartiles."""
    quarter, middle, three = statistics.quantiles(values, n=4, method="inclusive")
    named = {"min": min(values), "p25": quarter, "median": middle, "p75": three, "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


async def _window(server: Server, seconds: float, tokens: int, numbers: Iterator[int]) -> Window:
    """Keeps the server busy for `seconds`."""
    assert server.process_id is not None
    answered = 0

    async def ask(pool: Connections, end: float) -> None:
        nonlocal answered
        while time.perf_counter() < end:
            await pool.post("/v1/chat/completions", _body(next(numbers), tokens))
            answered += 1

    async with connections(Address.of(server.url), None) as pool:
        cpu, began = cpu_seconds(server.process_id), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_CLIENTS):
                tasks.create_task(ask(pool, began + seconds))
        took, used = time.perf_counter() - began, cpu_seconds(server.process_id) - cpu
    return answered / took, 1e6 * used / answered


def _body(number: int, tokens: int) -> bytes:
    text = f"{number:<{_PROMPT_CHARACTERS}}"
    message = {"role": "user", "content": text}
    return json.dumps({"model": _MODEL, "stream": True, "max_tokens": tokens, "messages": [message]}).encode()


if __name__ == "__main__":
    sys.exit(main())
