"""Serves a configuration with Tandem, loads it with chats, then with chats and embeddings, and reports both.

Chats arrive open-loop (Poisson), passages in bursts of one request. The report has latencies of both phases,
from the planned send times on, the device's memory when idle and after the load, and the counters of faults.
The exit status is 1 if a request was neither answered nor rejected, or if the device's memory was exceeded.

    python -m benchmark_control_plane.experiments.gpu_evidence.served_load CONFIG [--seconds 30] [--rate 4]
        [--results FILE]
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmark_control_plane.common.distributions import nearest_rank
from benchmark_control_plane.common.results_file import add_results, write_or_print
from benchmark_control_plane.common.servers import Server, interrupt_on_sigterm, serving, tandem_server
from benchmark_control_plane.experiments.collocation.interference import passage
from controlplane.sdk.async_client import AsyncTandem
from controlplane.sdk.errors import ApiError, TandemError
from controlplane.sdk.retries import Retries

OUTPUT_TOKENS = 128
_PASSAGES, _PASSAGE_WORDS, _BURST_SECONDS = 32, 60, 1.0
_PROMPT_WORDS = (20, 200)
_FAULTS = (
    "tandem_embedding_out_of_memory_total", "tandem_device_alerts_total", "tandem_engine_restarts_total",
    "tandem_embedding_restarts_total", "tandem_engine_preemptions_total", "tandem_quota_moves_total",
)  # fmt: skip
_MUST_BE_ZERO = _FAULTS[:4]


@dataclass
class PhaseLatencies:
    """Latencies of one phase in seconds, and how its requests ended."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    rejected: int = 0
    failed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Quantiles in milliseconds and counts."""
        figures = {"ttft_ms": self.ttft, "tpot_ms": self.tpot, "burst_ms": self.bursts}
        return {
            **{name: _quantiles(values) for name, values in figures.items() if values},
            "chats": len(self.ttft),
            "bursts": len(self.bursts),
            "rejected": self.rejected,
            "failed": self.failed[:10],
        }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    middle, high = statistics.median(values), nearest_rank(values, 0.99)
    return {"p50": round(1e3 * middle, 3), "p99": round(1e3 * high, 3)}


async def _chat(tandem: AsyncTandem, text: str, seen: PhaseLatencies, due: float) -> None:
    clock = asyncio.get_running_loop().time
    try:
        stream = tandem.stream(
            text, model="chat", max_tokens=OUTPUT_TOKENS, temperature=1.0, extra={"ignore_eos": True}
        )
        stamps = [clock() async for _ in stream]
    except TandemError as error:
        _ended_badly(error, seen)
        return
    if len(stamps) < 2:
        seen.failed.append(f"a chat of {OUTPUT_TOKENS} tokens had {len(stamps)} parts of text")
        return
    seen.ttft.append(stamps[0] - due)
    seen.tpot.append((stamps[-1] - stamps[0]) / (OUTPUT_TOKENS - 1))


async def _burst(tandem: AsyncTandem, texts: list[str], seen: PhaseLatencies, due: float) -> None:
    try:
        vectors = await tandem.embed(texts, model="embed", service_class="indexing")
    except TandemError as error:
        _ended_badly(error, seen)
        return
    if len(vectors.vectors) != len(texts):
        seen.failed.append(f"{len(vectors.vectors)} vectors for {len(texts)} passages")
    seen.bursts.append(asyncio.get_running_loop().time() - due)


def _ended_badly(error: TandemError, seen: PhaseLatencies) -> None:
    if isinstance(error, ApiError) and error.status == 429:
        seen.rejected += 1
    else:
        seen.failed.append(f"{type(error).__name__}: {error}"[:300])


async def phase(tandem: AsyncTandem, seconds: float, rate: float, *, has_bursts: bool) -> PhaseLatencies:
    """Sends chats at `rate` per second, and bursts of passages if stated, and waits for all of them."""
    rng, seen = random.Random(0), PhaseLatencies()
    clock = asyncio.get_running_loop().time
    due = burst = clock()
    end = due + seconds
    async with asyncio.TaskGroup() as requests:
        while due < end:
            await asyncio.sleep(max(0.0, due - clock()))
            requests.create_task(_chat(tandem, passage(rng, rng.randint(*_PROMPT_WORDS)), seen, due))
            if has_bursts and due >= burst:
                burst += _BURST_SECONDS
                texts = [passage(rng, _PASSAGE_WORDS) for _ in range(_PASSAGES)]
                requests.create_task(_burst(tandem, texts, seen, due))
            due += rng.expovariate(rate)
    return seen


async def _load(server: Server, seconds: float, rate: float) -> dict[str, PhaseLatencies]:
    async with AsyncTandem(server.url, retries=Retries(most=0)) as tandem:
        # Compiles and captures what the first requests need.
        await phase(tandem, 3.0, 2.0, has_bursts=True)
        return {
            "chats alone": await phase(tandem, seconds, rate, has_bursts=False),
            "chats and embeddings": await phase(tandem, seconds, rate, has_bursts=True),
        }


def _get(server: Server, path: str, key: str) -> str:
    request = urllib.request.Request(server.url + path, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def _counters(page: str) -> dict[str, float]:
    found = dict.fromkeys(_FAULTS, 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


def measure(config: Mapping[str, Any], seconds: float, rate: float) -> dict[str, Any]:
    """Starts a server of this configuration, loads it and returns the report."""
    key = secrets.token_hex(16)
    stated = {"admin_key_sha256": sha256(key.encode()).hexdigest(), **config.get("server", {})}
    with tempfile.TemporaryDirectory() as folder:
        server = tandem_server({**config, "server": stated}, Path(folder) / "tandem.yaml")
        begun = time.perf_counter()
        with serving(server, Path(folder) / "tandem.log") as up:
            started = time.perf_counter() - begun
            idle = json.loads(_get(up, "/admin/state", key))
            phases = asyncio.run(_load(up, seconds, rate))
            after, page = json.loads(_get(up, "/admin/state", key)), _get(up, "/metrics", key)
    return {
        "start_seconds": round(started, 1),
        "phases": {name: seen.to_json() for name, seen in phases.items()},
        "counters": _counters(page),
        "device": {"idle": idle["device"], "after": after["device"]},
        "owners": {"idle": idle["owners"], "after": after["owners"]},
    }


def complaints(report: Mapping[str, Any]) -> list[str]:
    """What must not happen under this load, in words; empty if nothing did."""
    found = [
        f"{name}={value:g}: must be 0"
        for name, value in report["counters"].items()
        if name in _MUST_BE_ZERO and value
    ]
    for name, seen in report["phases"].items():
        found += [f"{name}: {text}" for text in seen["failed"]]
        found += [f"{name}: no chat was answered"] if not seen["chats"] else []
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=4.0, help="chats per second")
    add_results(parser)
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    report = measure(config, options.seconds, options.rate)
    write_or_print(options.results, report)
    for text in (found := complaints(report)):
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
