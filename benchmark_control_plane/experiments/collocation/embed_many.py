"""Measures `embed_many` beside chat: its throughput, what it costs the chat, and where the CPU time goes.

The server of configs/dev.yaml serves a tiny Llama and MiniLM. The chat capacity is measured first: requests
per second of a saturated server. Then chat arrives open-loop (Poisson) at `--load` of it, alone for
`--seconds` and beside a process that embeds `--texts` texts: by `embed_many` with its defaults, and with each
number of calls in `--fixed` kept open. Chat arrives until the texts are embedded. The arrangements alternate
(A B C C B A). Attainment is that of the server's own counters in the class `interactive`: 1 s to the first
token and 100 ms per further token, rejections count as misses.

    python -m benchmark_control_plane.experiments.collocation.embed_many
        [--load 0.7] [--texts 2000] [--seconds 30] [--rounds 2] [--fixed 1 4 16] [--config FILE]
        [--results FILE]
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.common.http_client import Address, Connections, connections, request_bytes
from benchmark_control_plane.common.machine_load import cpu_snapshot, others_cores
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import interrupt_on_sigterm, serving, tandem_server
from benchmark_control_plane.experiments.collocation.interference import passage
from controlplane.sdk import Tandem
from controlplane.sdk.bulk_embedding import AdaptiveConcurrency, BulkEmbedding

_CONFIG = Path(__file__).parents[3] / "configs" / "dev.yaml"
_CHAT_WORDS, _OUTPUT_TOKENS = 40, 48
_TEXT_WORDS = 30
_SATURATING, _SATURATED_CHATS = 32, 160
_PAUSE_SECONDS = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")
_OUTCOME = re.compile(
    r'^tandem_requests_total\{class="interactive",kind="generate",outcome="(\w+)"\} (\S+)$', re.M
)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What runs beside chat: nothing (`calls` is None), `embed_many` ("default"), or so many open calls."""

    name: str
    calls: int | str | None


class FixedConcurrency(AdaptiveConcurrency):
    """Keeps the same number of calls open, whatever the server does."""

    def __init__(self, calls: int) -> None:
        super().__init__(calls)
        self._size = float(calls)

    def succeeded(self) -> None:
        """Changes nothing."""

    def refused(self, sent_at: float, now: float) -> None:
        """Changes nothing."""


def embed(url: str, texts: int, calls: int | str, seed: int) -> dict[str, int | float]:
    """Embeds texts and returns how many came back and the seconds; runs in a process of its own."""
    draw = random.Random(seed)
    given = (f"{number} {passage(draw, _TEXT_WORDS)}" for number in range(texts))
    embedded, begin = 0, time.monotonic()
    with Tandem(url) as tandem:
        run = BulkEmbedding(given, "minilm", {"service_class": "batch"}, tandem._retries)
        if isinstance(calls, int):
            run.concurrency = FixedConcurrency(calls)
        for batch in tandem._embed_batches(run):
            embedded += len(batch.texts)
    seconds = time.monotonic() - begin
    return {"lost": texts - embedded, "texts_per_s": embedded / seconds, "seconds": seconds}


def _body(draw: random.Random, service_class: str) -> bytes:
    return json.dumps({
        "model": "tiny-llama", "messages": [{"role": "user", "content": passage(draw, _CHAT_WORDS)}],
        "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True, "stream": True, "service_class": service_class,
    }).encode()  # fmt: skip


async def _chat(pool: Connections, address: Address, body: bytes) -> int:
    """Status of one chat, read to its end."""
    request = request_bytes(address, "POST", "/v1/chat/completions", body)
    return (await pool.exchange(request, lambda part: None)).status


async def _capacity(pool: Connections, address: Address) -> float:
    """Chats per second of a saturated server; a first round warms up."""
    draw = random.Random(1)
    for _ in range(2):
        free, start = asyncio.Semaphore(_SATURATING), time.monotonic()

        async def one(free: asyncio.Semaphore = free) -> None:
            body = _body(draw, "batch")
            async with free:
                status = await _chat(pool, address, body)
                # A busy event loop refuses requests, and needs a pause.
                while status == 429:
                    await asyncio.sleep(_PAUSE_SECONDS)
                    status = await _chat(pool, address, body)
            if status != 200:
                raise RuntimeError(f"a chat of the capacity measurement got {status}")

        await asyncio.gather(*(one() for _ in range(_SATURATED_CHATS)))
        took = time.monotonic() - start
    return _SATURATED_CHATS / took


async def _outcomes(pool: Connections, address: Address) -> dict[str, float]:
    parts: list[bytes] = []
    await pool.exchange(request_bytes(address, "GET", "/metrics"), parts.append)
    return {name: float(count) for name, count in _OUTCOME.findall(b"".join(parts).decode())}


@dataclass(slots=True)
class _Bench:
    url: str
    server_pid: int
    rate: float
    seconds: float
    texts: int
    embedding: ProcessPoolExecutor

    async def window(self, calls: int | str | None, seed: int) -> dict[str, Any]:
        """Chats until the texts are embedded; without `calls` for `seconds`, with nothing beside them."""
        address, draw = Address.of(self.url), random.Random(seed)
        loop = asyncio.get_running_loop()
        async with connections(address, 512) as pool:
            before, cpu, whole = (
                await _outcomes(pool, address),
                cpu_by_process(self.server_pid),
                cpu_snapshot(),
            )
            start = due = loop.time()
            beside: asyncio.Future[dict[str, int | float]] | None = None
            if calls is not None:
                beside = loop.run_in_executor(self.embedding, embed, self.url, self.texts, calls, seed)
            chats = []
            while loop.time() < start + self.seconds if beside is None else not beside.done():
                due += draw.expovariate(self.rate)
                await asyncio.sleep(due - loop.time())
                chats.append(asyncio.create_task(_chat(pool, address, _body(draw, "interactive"))))
            took = loop.time() - start
            used = cpu_by_process(self.server_pid)
            await asyncio.gather(*chats)
            after = await _outcomes(pool, address)
        counted = {name: count - before.get(name, 0.0) for name, count in after.items()}
        return {
            "chats": len(chats),
            "attainment": counted.get("met", 0.0) / len(chats),
            "outcomes": {name: int(count) for name, count in counted.items() if count},
            "embedding": None if beside is None else await beside,
            "cores": {name: (seconds - cpu.get(name, 0.0)) / took for name, seconds in used.items()},
            "cores_busy_with_others": others_cores(whole, cpu_snapshot()),
        }


def cpu_by_process(root: int) -> dict[str, float]:
    """CPU seconds of the server, its engine and its embedding workers, and of this process."""
    found: dict[str, float] = {}
    parents = {int(path.name): _stat(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    for pid, (parent, seconds) in parents.items():
        if pid == root:
            name = "server"
        elif pid == os.getpid():
            name = "chat client"
        elif parent == os.getpid():
            name = "embedding client"
        elif parent == root:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            name = "embedding worker" if b"embedding" in command else "engine"
        else:
            continue
        found[name] = found.get(name, 0.0) + seconds
    return found


def _stat(path: Path) -> tuple[int, float]:
    """Parent and CPU seconds of a process; it may have ended."""
    try:
        fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0.0
    return int(fields[1]), sum(map(int, fields[11:13])) / _TICKS


async def measure(url: str, server_pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """The report of all windows on a running server."""
    address = Address.of(url)
    async with connections(address, 512) as pool:
        capacity = await _capacity(pool, address)
    print(f"capacity: {capacity:.1f} chats per second", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as embedding:
        bench = _Bench(url, server_pid, options.load * capacity, options.seconds, options.texts, embedding)
        # Imports and the first passes are no part of a window.
        embedding.submit(embed, url, 200, 1, 0).result()
        report: dict[str, Any] = {
            "capacity_chats_per_s": capacity,
            "load": options.load,
            "texts": options.texts,
        }
        arrangements = [
            Arrangement("chat alone", None),
            Arrangement("embed_many", "default"),
            *(Arrangement(f"{calls} calls", calls) for calls in options.fixed),
        ]
        windows: dict[str, list[dict[str, Any]]] = {one.name: [] for one in arrangements}
        for number in range(options.rounds):
            for one in arrangements if number % 2 == 0 else arrangements[::-1]:
                found = await bench.window(one.calls, number)
                windows[one.name].append(found)
                print(one.name, json.dumps(found), file=sys.stderr, flush=True)
    return report | {"medians": _medians(windows), "windows": windows}


def _medians(windows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        name: {
            "attainment": statistics.median(one["attainment"] for one in found),
            "texts_per_s": statistics.median(
                one["embedding"]["texts_per_s"] if one["embedding"] else 0.0 for one in found
            ),
            "texts_lost": sum(one["embedding"]["lost"] for one in found if one["embedding"]),
        }
        for name, found in windows.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--texts", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--config", type=Path, default=_CONFIG, help="a changed copy of configs/dev.yaml")
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    config["models"].pop("rerankers", None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(tandem_server(config, folder / "tandem.yaml"), folder / "log"))
        assert server.process_id is not None
        report = asyncio.run(measure(server.url, server.process_id, options))
    write_or_print(options.results, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
