"""Measures the throughput of the embedding engine against sentence-transformers and infinity.

Alternately (A B B A) within one run: `SentenceTransformer.encode` on all texts at once; our engine on all
texts at once, called through its port; our server over HTTP, and the `infinity_emb` server of another
environment if one is named, at 64 concurrent clients with one text per request. Two kinds of text: queries
of 7 words, passages of 200. All use the same number of threads, and our vectors must equal those of
`encode`.

    python -m benchmark_control_plane.experiments.collocation.embedding_throughput
        [--infinity PATH/bin/infinity_emb] > RESULT.json

All compute on the same device, a GPU if there is one, in the same type: float16 on a GPU, otherwise the
type that the model is stored in. `--model`, `--device`, `--dtype` and `--memory` choose others. A GPU needs
more texts, since a round of milliseconds is too short to measure.
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
from typing import Any, Literal

import numpy as np
import uvloop

from backends.bundled_models import MINILM, resolve
from benchmark_control_plane.common.http_client import Address, connections
from benchmark_control_plane.common.machine_load import cpu_snapshot, others_cores
from benchmark_control_plane.common.servers import (
    Server,
    all_serving,
    free_port,
    interrupt_on_sigterm,
    tandem_server,
)
from benchmark_control_plane.experiments.collocation.interference import passage
from benchmark_control_plane.judge.systems import as_yaml
from controlplane.config.models_section import EmbeddingModel
from controlplane.core.clock import Instant
from controlplane.core.ports import Vectors
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.engine_builders import embedder_of

Dtype = Literal["float32", "float16", "bfloat16"]
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
    parser.add_argument("--model", default=MINILM)
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--memory", default="2GiB", help="pool memory of our server")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--passages", type=int, default=96)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    rng = random.Random(0)
    counts = {"queries": options.queries, "passages": options.passages}
    texts = {kind: [passage(rng, words) for _ in range(counts[kind])] for kind, words in _KINDS.items()}
    before = cpu_snapshot()
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        model = model_from(options)
        servers = [tandem_server(tandem_config(model, options.memory), folder / "tandem.yaml")]
        if options.infinity is not None:
            servers.append(infinity(options.infinity, model))
        up = exits.enter_context(all_serving([(s, folder / f"{s.name}.log") for s in servers]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_compare(up, texts, model, options.rounds))
    report["cores_busy_with_others"] = others_cores(before, cpu_snapshot())
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


def model_from(options: argparse.Namespace) -> EmbeddingModel:
    """The model with device and type set explicitly, since the defaults of the systems differ."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype: Dtype | None = options.dtype or (None if device == "cpu" else "float16")
    return EmbeddingModel(options.model, device=device, dtype=dtype, threads=options.threads)


def encoder_of(model: EmbeddingModel) -> Any:
    """The model in sentence-transformers, on the same device and in the same type."""
    from sentence_transformers import SentenceTransformer

    kwargs = {} if model.dtype is None else {"dtype": model.dtype}
    return SentenceTransformer(resolve(model.model), device=model.device, model_kwargs=kwargs)


async def _compare(
    servers: Sequence[Server], texts: dict[str, list[str]], model: EmbeddingModel, rounds: int
) -> dict[str, object]:
    import torch

    threads = model.threads or 1
    torch.set_num_threads(threads)
    encoder = encoder_of(model)
    engine = embedder_of(model)
    await engine.start()

    async def encode(given: list[str]) -> Vectors:
        return np.asarray(await asyncio.to_thread(encoder.encode, given, show_progress_bar=False))

    async def embed(given: list[str]) -> Vectors:
        return await engine.embed(_REQUEST, await engine.tokenize(given), deadline=None)

    systems: dict[str, Any] = {"encode": encode, "engine": embed}
    for server in servers:
        systems[f"{server.name}_http"] = lambda given, server=server: _over_http(server, model.model, given)
    report: dict[str, object] = {
        "model": model.model, "device": engine.facts.device, "dtype": model.dtype or "as stored",
        "threads": threads, "clients": CLIENTS, "rounds": rounds,
    }  # fmt: skip
    for kind, given in texts.items():
        rates: dict[str, list[float]] = {system: [] for system in systems}
        worst = dict.fromkeys(systems, 0.0)
        expected = await encode(given)
        for system in systems.values():
            await system(given[:CLIENTS])
        for number in range(rounds):
            for system in list(systems)[:: 1 if number % 2 == 0 else -1]:
                start = time.perf_counter()
                found = await systems[system](given)
                rates[system].append(len(given) / (time.perf_counter() - start))
                worst[system] = max(worst[system], float(np.abs(_vectors(found) - expected).max()))
        report[kind] = _summary(rates, worst)
        print(kind, json.dumps(report[kind], indent=1), file=sys.stderr)
    await engine.stop()
    return report


def _summary(rates: dict[str, list[float]], worst: dict[str, float]) -> dict[str, object]:
    """Medians over the rounds; ratios are taken within a round, with their range."""
    pairs = [("engine", "encode"), ("tandem_http", "encode"), ("tandem_http", "infinity_http")]
    ratios = {
        f"{ours}_over_{theirs}": [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
        for ours, theirs in pairs
        if ours in rates and theirs in rates
    }
    return {
        "texts_per_s": {system: statistics.median(found) for system, found in rates.items()},
        "largest_difference_from_encode": worst,
        "ratios": {pair: statistics.median(found) for pair, found in ratios.items()},
        "ratio_ranges": {pair: [min(found), max(found)] for pair, found in ratios.items()},
    }


async def _over_http(server: Server, model: str, given: Sequence[str]) -> list[bytes]:
    """Response bodies; parsing them is left for later, since it would take CPU time from the servers."""
    rows = [b""] * len(given)
    left = iter(range(len(given)))

    async with connections(Address.of(server.url), CLIENTS) as opened:

        async def client() -> None:
            for i in left:
                body = json.dumps({"model": model, "input": [given[i]]}).encode()
                rows[i] = await opened.post("/v1/embeddings", body)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return rows


def _vectors(found: Vectors | list[bytes]) -> Vectors:
    if isinstance(found, list):
        return np.array([json.loads(row)["data"][0]["embedding"] for row in found], dtype=np.float32)
    return found


def tandem_config(model: EmbeddingModel, memory: str) -> dict[str, Any]:
    """Configuration of a Tandem server with this embedding model alone."""
    return {
        "models": {"embeddings": [as_yaml(model)]},
        "pool": {"memory": memory},
        "quota": {"llm": {"nominal": 0}, "embedding": {"nominal": 1}},
    }


def infinity(program: Path, model: EmbeddingModel) -> Server:
    """The command of the `infinity_emb` server at the path `program`."""
    port = free_port()
    command = [
        str(program), "v2", "--model-id", resolve(model.model), "--served-model-name", model.model,
        "--port", str(port), "--url-prefix", "/v1", "--device", str(model.device).partition(":")[0],
        "--engine", "torch", "--batch-size", "32", "--no-bettertransformer",
    ]  # fmt: skip
    command += [] if model.dtype is None else ["--dtype", model.dtype]
    return Server("infinity", command, port, "/health", threads=model.threads or 1)


if __name__ == "__main__":
    raise SystemExit(main())
