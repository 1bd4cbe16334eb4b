"""Samples memory use and engine counters during a run, from a server's metrics or the simulated pool.

Tandem reports bytes by owner. vLLM alone reports the used share of its KV cache; the memory of an embedding
server next to it is unknown, so that owner is absent.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmark_control_plane.common.http_client import Address, Connections, request_bytes

Sample = Mapping[str, float]
"""One sample: `held:OWNER`, `quota:OWNER`, `used:OWNER` in bytes; `preemptions`, `recompute_tokens`,
`queries`, `hits` and `busy_seconds` of the device as totals since the start of the server."""
Read = Callable[[], Awaitable[Sample]]

GAUGES = {"held_bytes": "held", "quota_bytes": "quota", "engine_used_bytes": "used"}
_LINE = re.compile(rb"^([a-zA-Z_:]+)(?:\{([^}]*)\})? ([-+0-9.eE]+)$", re.MULTILINE)
_OWNER = re.compile(rb'owner="(\w+)"')
TOTALS = {
    b"tandem_engine_preemptions_total": "preemptions",
    b"tandem_engine_recompute_tokens_total": "recompute_tokens",
    b"tandem_prefix_cache_queries_total": "queries",
    b"tandem_prefix_cache_hits_total": "hits",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:prefix_cache_queries_total": "queries",
    b"vllm:prefix_cache_hits_total": "hits",
}


@dataclass(slots=True)
class MemorySampler:
    """Time series of samples; `times` are seconds from the start of the measured window."""

    times: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def poll(self, read: Read, clock: Callable[[], float], origin: float, every: float) -> None:
        """Takes a sample every `every` seconds until cancelled; a failed read leaves a gap."""
        while True:
            try:
                sample = await read()
            except OSError:
                sample = {}
            if sample:
                self.times.append(clock() - origin)
                self.samples.append(sample)
            await asyncio.sleep(every)

    def memory(self) -> dict[str, Any] | None:
        """Bytes by owner over time, as in results.json; None without samples.

        The bytes are those used by the engine if reported, otherwise those leased.
        """
        owners = sorted({key.partition(":")[2] for sample in self.samples for key in sample if ":" in key})
        if not owners:
            return None
        return {
            "unit": "bytes",
            "times_s": [round(at, 3) for at in self.times],
            "by_owner": {owner: [_held(sample, owner) for sample in self.samples] for owner in owners},
            "quota_by_owner": {
                owner: [sample.get(f"quota:{owner}", 0.0) for sample in self.samples]
                for owner in owners
                if any(f"quota:{owner}" in sample for sample in self.samples)
            },
        }

    def engine(self, measured: float) -> dict[str, float | None] | None:
        """Engine counters over the run, as in results.json; None without samples.

        `overflow` is the share of samples in which an owner exceeds its quota, `memory_use` the mean share of
        all quotas that is held, `device_busy` the share of the `measured` seconds in which the device
        computed; None for real engines.
        """
        if not self.samples:
            return None
        over = [
            any(_held(s, owner) > s[key] for key in s if key.startswith("quota:")
                for owner in [key.partition(":")[2]])
            for s in self.samples
        ]  # fmt: skip
        has_quota = any(key.startswith("quota:") for s in self.samples for key in s)
        hits, queries = self._grown("hits"), self._grown("queries")
        return {
            "preemptions": self._grown("preemptions"),
            "recompute_tokens": self._grown("recompute_tokens"),
            "overflow": sum(over) / len(over) if has_quota else None,
            "cache_hit": hits / queries if hits is not None and queries else None,
            "memory_use": self._use(),
            "device_busy": self._busy(measured),
        }

    def _use(self) -> float | None:
        uses = []
        for sample in self.samples:
            owners = {key.partition(":")[2] for key in sample if ":" in key}
            if quota := sum(value for key, value in sample.items() if key.startswith("quota:")):
                uses.append(sum(_held(sample, owner) for owner in owners) / quota)
        return fmean(uses) if uses else None

    def _busy(self, measured: float) -> float | None:
        seen = [
            (at, sample["busy_seconds"])
            for at, sample in zip(self.times, self.samples, strict=True)
            if 0 <= at <= measured and "busy_seconds" in sample
        ]
        if len(seen) < 2:
            return None
        (start, before), (end, after) = seen[0], seen[-1]
        return (after - before) / (end - start)

    def _grown(self, total: str) -> float | None:
        seen = [sample[total] for sample in self.samples if total in sample]
        return seen[-1] - seen[0] if seen else None


def _held(sample: Sample, owner: str) -> float:
    return sample.get(f"used:{owner}", sample.get(f"held:{owner}", 0.0))


def metrics_reader(address: Address, pool: Connections, kv_bytes: int | None) -> Read:
    """Reader of /metrics; `kv_bytes` is the size of a KV cache whose use is reported as a share."""
    request = request_bytes(address, "GET", "/metrics")

    async def read() -> Sample:
        parts: list[bytes] = []
        head = await pool.exchange(request, parts.append)
        return parse_metrics(b"".join(parts), kv_bytes) if head.status == 200 else {}

    return read


def parse_metrics(text: bytes, kv_bytes: int | None) -> Sample:
    """Sample from a page in Prometheus text format."""
    sample: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        owner = _OWNER.search(labels)
        short = name.removeprefix(b"tandem_").decode()
        if owner is not None and name.startswith(b"tandem_") and short in GAUGES:
            sample[f"{GAUGES[short]}:{owner[1].decode()}"] = float(value)
        elif (total := TOTALS.get(name)) is not None:
            sample[total] = sample.get(total, 0.0) + float(value)
        elif name == b"vllm:kv_cache_usage_perc" and kv_bytes is not None:
            sample["used:llm"] = float(value) * kv_bytes
            sample["quota:llm"] = float(kv_bytes)
    return sample
