"""Is the embedding engine as fast as the dedicated ones? Against sentence-transformers and infinity.

In turn, A B B A, within one run: `SentenceTransformer.encode` given all texts at once; our engine given
them at once, behind its port; our server over HTTP, and the `infinity_emb` server of another
environment if one is named, at 64 concurrent clients with one text a request. Two kinds of text: queries of
7 words, passages of 200. All use the same number of threads; the vectors of ours must equal encode's.

    python -m benchmark_control_plane.embedding_throughput [--infinity PATH/bin/infinity_emb] > RESULT.json
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from backends.embedding.bundled import MINILM, resolve
from backends.embedding.client import WorkerEmbedder
from benchmark_control_plane.collocation import passage
from benchmark_control_plane.http_client import Address, connections
from benchmark_control_plane.machine import look, others_cores
from benchmark_control_plane.servers import Server, all_serving, free_port, stop_as_interrupted, tandem_server
from controlplane.core.clock import Instant
from controlplane.core.ports import Vectors
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

CLIENTS = 64
_KINDS = {"queries": 7, "passages": 200}
_REQUEST = Request(
    id="bench", kind=Kind.EMBED, model=MINILM, tenant="bench", arrival=Instant(0), slo=Slo(),
    service_class=ServiceClass("standard", Slo(), priority=0, sheddable=False), prompt_tokens=1,
    max_output_tokens=0,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--infinity", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--passages", type=int, default=96)
    options = parser.parse_args(arguments)
    stop_as_interrupted()
    rng = random.Random(0)
    counts = {"queries": options.queries, "passages": options.passages}
    texts = {kind: [passage(rng, words) for _ in range(counts[kind])] for kind, words in _KINDS.items()}
    before = look()
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        servers = [_tandem(folder, options.threads)]
        if options.infinity is not None:
            servers.append(_infinity(options.infinity, options.threads))
        up = exits.enter_context(all_serving([(s, folder / f"{s.name}.log") for s in servers]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_compare(up, texts, options.threads, options.rounds))
    report["cores_busy_with_others"] = others_cores(before, look())
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


async def _compare(
    servers: Sequence[Server], texts: dict[str, list[str]], threads: int, rounds: int
) -> dict[str, object]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    encoder = SentenceTransformer(resolve(MINILM), device="cpu")
    engine = WorkerEmbedder(MINILM, threads=threads)
    await engine.start()

    async def encoded(given: list[str]) -> Vectors:
        return np.asarray(await asyncio.to_thread(encoder.encode, given, show_progress_bar=False))

    async def computed(given: list[str]) -> Vectors:
        return await engine.embed(_REQUEST, await engine.tokenize(given), deadline=None)

    ways: dict[str, Any] = {"encode": encoded, "engine": computed}
    for server in servers:
        ways[f"{server.name}_http"] = lambda given, server=server: _over_http(server, given)
    report: dict[str, object] = {"threads": threads, "clients": CLIENTS, "rounds": rounds}
    for kind, given in texts.items():
        rates: dict[str, list[float]] = {way: [] for way in ways}
        worst = dict.fromkeys(ways, 0.0)
        expected = await encoded(given)
        for way in ways.values():
            await way(given[:CLIENTS])
        for turn in range(rounds):
            for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                start = time.perf_counter()
                found = await ways[way](given)
                rates[way].append(len(given) / (time.perf_counter() - start))
                worst[way] = max(worst[way], float(np.abs(_vectors(found) - expected).max()))
        report[kind] = _told(rates, worst)
        print(kind, json.dumps(report[kind], indent=1), file=sys.stderr)
    await engine.stop()
    return report


def _told(rates: dict[str, list[float]], worst: dict[str, float]) -> dict[str, object]:
    """Ratios are taken within a turn: their median, and the smallest and largest."""
    pairs = [("engine", "encode"), ("tandem_http", "encode"), ("tandem_http", "infinity_http")]
    ratios = {
        f"{ours}_over_{theirs}": [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
        for ours, theirs in pairs
        if ours in rates and theirs in rates
    }
    return {
        "texts_per_s": {way: statistics.median(found) for way, found in rates.items()},
        "largest_difference_from_encode": worst,
        "ratios": {pair: statistics.median(found) for pair, found in ratios.items()},
        "ratio_ranges": {pair: [min(found), max(found)] for pair, found in ratios.items()},
    }


async def _over_http(server: Server, given: Sequence[str]) -> list[bytes]:
    """The answers unread: reading floats would be the client's own work, in the way of the servers'."""
    rows = [b""] * len(given)
    left = iter(range(len(given)))

    async with connections(Address.of(server.url), CLIENTS) as opened:

        async def client() -> None:
            for i in left:
                body = json.dumps({"model": MINILM, "input": [given[i]]}).encode()
                rows[i] = await opened.post("/v1/embeddings", body)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return rows


def _vectors(found: Vectors | list[bytes]) -> Vectors:
    if isinstance(found, list):
        return np.array([json.loads(row)["data"][0]["embedding"] for row in found], dtype=np.float32)
    return found


def _tandem(folder: Path, threads: int) -> Server:
    config = {
        "models": {"embeddings": [{"model": MINILM, "threads": threads}]},
        "pool": {"memory": "2GiB"},
        "quota": {"llm": {"nominal": 0}, "embedding": {"nominal": 1}},
    }
    return tandem_server(config, folder / "tandem.yaml")


def _infinity(program: Path, threads: int) -> Server:
    port = free_port()
    command = [
        str(program), "v2", "--model-id", resolve(MINILM), "--served-model-name", MINILM, "--port", str(port),
        "--url-prefix", "/v1", "--device", "cpu", "--engine", "torch", "--batch-size", "32",
        "--no-bettertransformer",
    ]  # fmt: skip
    return Server("infinity", command, port, "/health", threads=threads)


if __name__ == "__main__":
    raise SystemExit(main())
