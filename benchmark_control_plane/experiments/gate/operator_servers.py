"""Three simulated servers under load, on which the tasks of docs/operator-tasks.md are tried.

On `GATE` the gate preempts and rejects, since vLLM's own scheduler orders the engine. On `QUOTAS` quotas
move. `STATIC` has the default arrangement, in which they do not.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmark_control_plane.common.servers import Server, free_port

ADMIN_KEY = "operator"
CHAT_MODEL, EMBED_MODEL = "chat-model", "embed-model"
GATE, QUOTAS, STATIC = "gate", "quotas", "static"
_PERIOD_S, _BUSY = 25.0, 1.6
_SERVER = "benchmark_control_plane.experiments.faults.simulated_server"
_CLASSES: Mapping[str, Any] = {
    "interactive": {"priority": 5, "ttft_ms": 400, "tpot_ms": 60, "default": True},
    "batch": {"ttft_ms": 20_000, "sheddable": False},
    "search": {"priority": 4, "ttft_ms": 300},
    "indexing": {"ttft_ms": 10_000, "sheddable": False},
}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    GATE: {
        "scheduling": {"engine": "off"},
        "admission": {"engine_queue": 0, "max_waiting": 2},
    },
    QUOTAS: {
        # Both together would need 56 MiB.
        "pool": {"kv_allocator": "kvcached", "memory": "40MiB"},
        "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}},
    },
    STATIC: {"scheduling": {"engine": {"decode_pacing": 0.8}}},
}
_ENGINE: Mapping[str, Mapping[str, int]] = {
    GATE: {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 * 2**20},
    QUOTAS: {"max_num_seqs": 32, "kv_cache_memory_bytes": 40 * 2**20},
    STATIC: {"max_num_seqs": 32, "kv_cache_memory_bytes": 40 * 2**20},
}


@dataclass(frozen=True, slots=True)
class Stream:
    """Poisson arrivals of equal requests: `rate` a second, prompt tokens, output tokens (0: an embedding)."""

    service_class: str
    rate: float
    prompt: int
    output: int = 0
    inputs: int = 1


LOAD: Mapping[str, Sequence[Stream]] = {
    GATE: (Stream("batch", 1.0, 60, 200), Stream("interactive", 0.6, 40, 15), Stream("search", 1.0, 30)),
    QUOTAS: (
        Stream("interactive", 2.5, 400, 100),
        Stream("batch", 0.5, 1_800, 300),
        Stream("search", 3.0, 60),
        Stream("indexing", 0.8, 300, inputs=40),
    ),
    STATIC: (Stream("interactive", 1.0, 100, 30), Stream("search", 1.0, 60)),
}


def server(name: str, folder: Path) -> Server:
    """The server `name`, not started; its configuration file is in `folder`."""
    port = free_port()
    content = {
        "server": {"port": port, "admin_key_sha256": sha256(ADMIN_KEY.encode()).hexdigest()},
        "models": {
            "chat": {"model": "tandem/tiny-llama", "name": CHAT_MODEL, "engine": dict(_ENGINE[name])},
            "embeddings": [{"model": "tandem/minilm", "name": EMBED_MODEL, "batch_tokens": 16_384}],
        },
        "classes": dict(_CLASSES),
        **SECTIONS[name],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return Server(name, [sys.executable, "-m", _SERVER, str(path)], port, "/ready")


@asynccontextmanager
async def loaded(servers: Mapping[str, Server]) -> AsyncIterator[None]:
    """Sends the load of each server while the block runs."""
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        sending = [
            asyncio.create_task(_send(http, server.url, stream, seed))
            for seed, (name, server) in enumerate(servers.items())
            for stream in LOAD[name]
        ]
        try:
            yield
        finally:
            for task in sending:
                task.cancel()
            ended = await asyncio.gather(*sending, return_exceptions=True)
            # A stream that ended before it was cancelled has failed.
            if failed := [each for each in ended if isinstance(each, Exception)]:
                raise ExceptionGroup("the load was not sent", failed)


async def _send(http: httpx.AsyncClient, url: str, stream: Stream, seed: int) -> None:
    """Sends one stream until it is cancelled; refused requests are part of the load.

    Generations and embeddings have their busy periods in turn.
    """
    randomness = random.Random(f"{stream.service_class} {seed}")
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            size = randomness.randint(stream.prompt // 2, stream.prompt * 3 // 2)
            group.create_task(_ask(http, url, stream, f"{stream.service_class}-{number}", size))
            is_busy = (time.monotonic() // _PERIOD_S) % 2 == bool(stream.output)
            rate = stream.rate * (_BUSY if is_busy else 2 - _BUSY)
            await asyncio.sleep(randomness.expovariate(rate))


async def _ask(http: httpx.AsyncClient, url: str, stream: Stream, name: str, size: int) -> None:
    headers = {"x-service-class": stream.service_class, "x-request-id": name}
    if stream.output:
        path = "/v1/completions"
        body: dict[str, Any] = {"model": CHAT_MODEL, "prompt": "x" * size, "max_tokens": stream.output}
    else:
        path = "/v1/embeddings"
        body = {"model": EMBED_MODEL, "input": ["x" * size] * stream.inputs}
    answer = await http.post(f"{url}{path}", json=body, headers=headers)
    if answer.status_code not in (200, 429, 503):
        raise RuntimeError(f"{path} returned {answer.status_code}: {answer.text[:300]}")
