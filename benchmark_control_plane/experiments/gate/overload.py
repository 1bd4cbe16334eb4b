"""Measures responses and memory under three times the sustainable rate.

The sustainable rate is measured first: a fixed number of requests sent at once, divided by the time until the
last response. Then chat and embeddings arrive open-loop at a multiple of it, in three classes, while /metrics
is sampled. Every request must get an HTTP response, held and used bytes must stay within the quotas, and no
bytes may be held afterwards.

    python -m benchmark_control_plane.experiments.gate.overload [--factor 3] [--seconds 20]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmark_control_plane.common.servers import interrupt_on_sigterm, serving, tandem_server

CONFIG: dict[str, Any] = {
    "models": {
        "chat": {
            "model": "tandem/tiny-llama",
            "name": "tiny-llama",
            # Memory for about twenty requests, fewer than max_num_seqs, so that memory is exhausted first.
            "engine": {"max_model_len": 512, "max_num_seqs": 64, "enforce_eager": True,
                       "kv_cache_memory_bytes": 8 * 2**20},
        },
        "embeddings": [{"model": "tandem/minilm", "name": "minilm", "batch_tokens": 4096, "threads": 1}],
    },
    "pool": {"memory": "2GiB"},
    "quota": {"llm": {"nominal": 0.7}, "embedding": {"nominal": 0.3}},
    "classes": {
        "interactive": {"priority": 2, "ttft_ms": 500},
        "standard": {"priority": 1, "ttft_ms": 3000, "default": True},
        "batch": {"priority": 0, "sheddable": False},
    },
    "admission": {"max_wait_ms": 5000, "max_waiting": 200},
}  # fmt: skip
_CLASSES = ("interactive", "standard", "batch")
_PROBE = 60
_EMBEDDING_SHARE = 0.3
_PROMPT = "Tell me everything about queues, pools and the memory that they share. " * 4


@dataclass
class ResponseCounts:
    """Counts of responses, and maxima of the sampled bytes.

    `unanswered` counts transport errors, `silent` counts rejections without Retry-After.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    silent: int = 0
    most: dict[str, float] = field(default_factory=dict)
    over_quota: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(tandem_server(CONFIG, folder / "tandem.yaml"), folder / "log"))
        report = asyncio.run(overload(server.url, options.factor, options.seconds, options.seed))
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


async def overload(url: str, factor: float, seconds: float, seed: int) -> dict[str, object]:
    """Report of one overload run against the server at `url`; `factor` multiplies the sustainable rate."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        sustainable = await _sustainable(http)
        rate = factor * sustainable
        tally, draw, loop = ResponseCounts(), random.Random(seed), asyncio.get_running_loop()
        start, sending = loop.time(), []
        watching = asyncio.create_task(_watch(http, tally))
        due = 0.0
        while due < seconds:
            await asyncio.sleep(max(0.0, start + due - loop.time()))
            body = _embedding(draw) if draw.random() < _EMBEDDING_SHARE else _chat(draw)
            sending.append(asyncio.create_task(_send(http, body, draw.choice(_CLASSES), tally)))
            due += draw.expovariate(rate)
        await asyncio.gather(*sending)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return {
            "sustainable_rps": sustainable,
            "offered_rps": rate,
            "sent": len(sending),
            "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
            "unanswered": dict(tally.unanswered),
            "rejections_without_retry_after": tally.silent,
            "most_bytes": tally.most,
            "samples_over_quota": tally.over_quota,
            "held_after": await _held(http),
            "ready_after": (await http.get("/ready")).status_code,
        }


def _chat(draw: random.Random) -> tuple[str, dict[str, object]]:
    text = _PROMPT[: draw.randrange(40, len(_PROMPT))]
    body = {"model": "tiny-llama", "prompt": text, "max_tokens": draw.randrange(16, 128), "ignore_eos": True}
    return "/v1/completions", body


def _embedding(draw: random.Random) -> tuple[str, dict[str, object]]:
    return "/v1/embeddings", {"model": "minilm", "input": [_PROMPT] * draw.randrange(1, 16)}


async def _sustainable(http: httpx.AsyncClient) -> float:
    """Requests per second with enough requests to fill every batch, none of them sheddable."""
    draw, tally, loop = random.Random(7), ResponseCounts(), asyncio.get_running_loop()
    for _ in range(2):  # the first round is the warm-up
        bodies = [_embedding(draw) if n % 10 < 10 * _EMBEDDING_SHARE else _chat(draw) for n in range(_PROBE)]
        start = loop.time()
        await asyncio.gather(*(_send(http, body, "batch", tally) for body in bodies))
        took = loop.time() - start
    return _PROBE / took


async def _send(
    http: httpx.AsyncClient, body: tuple[str, dict[str, object]], service_class: str, tally: ResponseCounts
) -> None:
    path, content = body
    try:
        response = await http.post(path, json=content, headers={"x-service-class": service_class})
    except httpx.HTTPError as error:
        tally.unanswered[repr(error)] += 1
        return
    tally.statuses[response.status_code] += 1
    if response.status_code == 429 and int(response.headers.get("retry-after", 0)) < 1:
        tally.silent += 1


async def _watch(http: httpx.AsyncClient, tally: ResponseCounts) -> None:
    while True:
        values = await _bytes(http)
        for name, value in values.items():
            tally.most[name] = max(value, tally.most.get(name, 0.0))
        tally.over_quota += any(
            values[f"{kind}:{owner}"] > values[f"quota:{owner}"]
            for kind, owner in (("held", "llm"), ("held", "embedding"), ("engine_used", "llm"))
        )
        await asyncio.sleep(0.1)


async def _bytes(http: httpx.AsyncClient) -> dict[str, float]:
    """Values of `tandem_NAME_bytes{owner=OWNER}` as NAME:OWNER."""
    found = {}
    for line in (await http.get("/metrics")).text.splitlines():
        name, _, rest = line.partition('_bytes{owner="')
        if rest and name.startswith("tandem_"):
            owner, _, value = rest.partition('"} ')
            found[f"{name.removeprefix('tandem_')}:{owner}"] = float(value)
    return found


async def _held(http: httpx.AsyncClient) -> float:
    return sum(value for name, value in (await _bytes(http)).items() if name.startswith("held:"))


if __name__ == "__main__":
    raise SystemExit(main())
