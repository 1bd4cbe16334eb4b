"""How do requests fare in a vLLM engine stepped on virtual time? One run: a policy, a load, a steady window.

Arrivals go on past the window, and what has not finished when the run ends is a miss. Two metrics,
always both. *Published*: first token in time, and the 99th percentile of the gaps between tokens
within the limit (nearest rank). It has a hole: an answer of more than 100 tokens may pause once for
as long as it likes. *Strict*: first token in time, and no gap above the limit.

Of the memory, two shares over the window: what is held after a step, by whomever, and what answers that kept
the strict promise held while they were written. The rest of the first did nobody any good.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from backends.vllm.simulation.stepped_engine import HiddenStates, Setup, SteppedEngine
from benchmark_control_plane.experiments.engine.workload import Offer, TokenObjectives

_NS = 1e9
# The longest answers take about 70 s when nothing disturbs them.
_TAIL_SECONDS = 90.0
_STUCK_STEPS = 2_000


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """`policy` None: vLLM's own scheduler, under `stock`."""

    name: str
    options: Mapping[str, Any] | None = None
    stock: str = "fcfs"
    knows_lengths: bool = True
    hidden: HiddenStates | None = None


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    warm_up: int
    requests: int


@dataclass(eq=False, slots=True)
class _RequestTimes:
    offer: Offer
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    over: int = 0
    longest: float = 0.0
    is_finished: bool = False

    def seen(self, now: float, tokens: int, limit: float) -> None:
        if self.first is None:
            self.first = now
        else:
            gap = now - self.last
            self.longest = max(self.longest, gap)
            self.over += gap > limit
        self.last = now
        self.tokens += tokens

    def is_in_time(self, promise: TokenObjectives) -> bool:
        return self.is_finished and self.first is not None and self.first - self.offer.at <= promise.ttft

    def keeps_published(self, promise: TokenObjectives) -> bool:
        allowed = math.floor(0.01 * max(0, self.tokens - 1))
        return self.is_in_time(promise) and self.over <= allowed

    def keeps_strict(self, promise: TokenObjectives) -> bool:
        return self.is_in_time(promise) and self.over == 0

    def block_seconds(self, block_tokens: int) -> float:
        """What it held from its first token to its last, if it never paused; half a block is not full."""
        if self.first is None:
            return 0.0
        blocks = (self.offer.prompt + self.tokens / 2) / block_tokens + 0.5
        return blocks * (self.last - self.first)

    def is_lost(self, now: float, promise: TokenObjectives) -> bool:
        """By either metric, whatever comes."""
        return (now if self.first is None else self.first) - self.offer.at > promise.ttft


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Of the window. `longest_gap` is over everybody, `lost_wait` quantiles over the requests that missed:
    seconds from arrival to the first token, or to the end of the run for those that never got one. The shares
    are of the memory: what anybody holds, and answers that keep the strict promise."""

    rate: float
    published: float
    strict: float
    unfinished: float
    preemptions: int
    longest_gap: float
    kept_gap: float
    lost_wait: Mapping[str, float]
    held_share: float
    kept_share: float
    steps: int
    hook_us: float
    seconds: float
    virtual_seconds: float


@dataclass(slots=True)
class _Counts:
    """`held` sums the held share of the memory times seconds, over the window."""

    steps: int = 0
    hook_ns: int = 0
    held: float = 0.0

    def stepped(self, scheduler: Any, seconds: float) -> None:
        self.steps += 1
        self.hook_ns += getattr(scheduler, "hook_ns", 0)
        self.held += scheduler.kv_cache_manager.usage * seconds


def play(
    engine: SteppedEngine,
    contender: EngineVariant,
    offers: Iterator[Offer],
    window: ReplayWindow,
    promise: TokenObjectives,
    rate: float,
) -> ReplayResult:
    began = perf_counter()
    scheduler = engine.restart(stock=contender.stock, tandem=contender.options, hidden=contender.hidden)
    records: dict[str, _RequestTimes] = {}
    last_at = math.inf
    upcoming = next(offers)
    counts, idle = _Counts(), 0
    pending: set[str] = set()
    while True:
        now = engine.now_ns / _NS
        while upcoming.at <= now:
            request_id = f"r{len(records)}"
            records[request_id] = _RequestTimes(upcoming)
            index = len(records) - 1
            if window.warm_up <= index < window.warm_up + window.requests:
                pending.add(request_id)
                last_at = upcoming.at if index == window.warm_up + window.requests - 1 else last_at
            _send(engine, request_id, upcoming, promise, contender)
            upcoming = next(offers)
        if now > last_at and (not pending or now > last_at + _TAIL_SECONDS):
            break
        if not scheduler.requests:
            engine.jump(math.ceil(upcoming.at * _NS) + 1)
            continue
        produced = engine.step()
        after = engine.now_ns / _NS
        is_open = len(records) > window.warm_up and now <= last_at
        counts.stepped(scheduler, after - now if is_open else 0.0)
        if after == now:
            idle += 1
            if idle > _STUCK_STEPS:
                raise RuntimeError(f"{contender.name}: {idle} steps in a row did nothing at {now:.1f} s")
            if not produced:
                # Nothing may run before somebody's time comes; a live engine would ask again at once.
                engine.jump(engine.now_ns + 1_000_000)
        else:
            idle = 0
        for request_id, tokens, is_finished in produced:
            record = records[request_id]
            record.seen(after, tokens, promise.gap)
            if is_finished:
                record.is_finished = True
                pending.discard(request_id)
        if now > last_at and counts.steps % 64 == 0:
            pending = {one for one in pending if not records[one].is_lost(after, promise)}
    unfinished = scheduler.requests.values()
    preemptions = getattr(scheduler, "preempted", sum(one.num_preemptions for one in unfinished))
    measured = list(records.values())[window.warm_up : window.warm_up + window.requests]
    end = engine.now_ns / _NS
    took = perf_counter() - began
    return _outcome(measured, promise, rate, end, counts, preemptions, took, engine.setup)


def _send(
    engine: SteppedEngine, request_id: str, offer: Offer, promise: TokenObjectives, contender: EngineVariant
) -> None:
    said: dict[str, Any] = {
        "arrival_ns": round(offer.at * _NS), "ttft_ms": promise.ttft * 1e3, "gap_ms": promise.gap * 1e3,
    }  # fmt: skip
    priority = 0
    if contender.knows_lengths and offer.predicted is not None:
        said["tokens"] = offer.predicted
        if offer.forecast is not None:
            said |= {"levels": list(offer.forecast.levels), "quantiles": list(offer.forecast.tokens)}
        priority = offer.predicted if contender.stock == "priority" else 0
    limit = engine.setup.max_model_tokens - offer.prompt
    engine.add(request_id, offer.prompt, offer.output, extra={"tandem": said}, priority=priority, limit=limit)


def _outcome(
    measured: list[_RequestTimes],
    promise: TokenObjectives,
    rate: float,
    end: float,
    counts: _Counts,
    preemptions: int,
    took: float,
    setup: Setup,
) -> ReplayResult:
    count = len(measured)
    kept = [r for r in measured if r.keeps_strict(promise)]
    lost = [r for r in measured if not r.keeps_strict(promise)]
    waits = sorted((end if r.first is None else r.first) - r.offer.at for r in lost)
    span = measured[-1].offer.at - measured[0].offer.at
    earned = sum(r.block_seconds(setup.block_tokens) for r in kept)
    gaps = [max(r.longest, 0.0 if r.is_finished or r.first is None else end - r.last) for r in measured]
    return ReplayResult(
        rate=rate,
        published=sum(r.keeps_published(promise) for r in measured) / count,
        strict=len(kept) / count,
        unfinished=sum(not r.is_finished for r in measured) / count,
        preemptions=preemptions,
        longest_gap=max(gaps),
        kept_gap=max((r.longest for r in kept), default=0.0),
        lost_wait={f"p{level}": _quantile(waits, level / 100) for level in (50, 95, 100)},
        held_share=counts.held / span,
        kept_share=earned / (setup.blocks * span),
        steps=counts.steps,
        hook_us=counts.hook_ns / max(1, counts.steps) / 1e3,
        seconds=took,
        virtual_seconds=end,
    )


def _quantile(ordered: list[float], level: float) -> float:
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))] if ordered else 0.0
