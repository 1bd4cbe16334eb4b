"""Replays one arrival trace through a vLLM scheduler stepped on virtual time and measures a steady window.

Arrivals continue past the window, and a request that has not finished when the run ends is a miss. Two
metrics are always reported. *Published*: first token in time, and the 99th percentile of the gaps between
tokens within the limit (nearest rank); an output of more than 100 tokens may therefore pause once for any
length of time. *Strict*: first token in time, and no gap above the limit.

With a gate in front (`EngineVariant.has_gate`) a rejected request is a miss that waits for nothing. Embedding
passes, where the load has them, run one at a time between two steps of the engine.

Two shares of the memory are averaged over the window: the blocks held after a step, and the blocks that
outputs held that met the strict objectives. The difference is memory spent on requests that missed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter
from typing import Any

from backends.vllm.plugin.request_metadata import Defaults, make_engine_request
from backends.vllm.simulation.stepped_engine import HiddenStates, SteppedEngine, SteppedEngineSetup
from benchmark_control_plane.common.distributions import nearest_rank
from benchmark_control_plane.experiments.engine.gate_in_front import GateInFront
from benchmark_control_plane.experiments.engine.offered_load import EmbeddingsBeside, Offer, TokenObjectives
from controlplane.core.clock import Instant

_NS = 1e9
# The longest outputs take about 70 s on an idle engine.
_TAIL_SECONDS = 90.0
_STUCK_STEPS = 2_000


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """A scheduler under test: the plug-in with `options`, or with None vLLM's own policy `stock`.

    The weight of a class is `weights` by priority; with None, the default of its priority.
    """

    name: str
    options: Mapping[str, Any] | None = None
    stock: str = "fcfs"
    hidden: HiddenStates | None = None
    has_gate: bool = False
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """Requests before the measured ones, and number of measured requests."""

    warm_up: int
    requests: int

    def __contains__(self, index: int) -> bool:
        return self.warm_up <= index <= self.last

    @property
    def last(self) -> int:
        """Index of the last measured request."""
        return self.warm_up + self.requests - 1


@dataclass(eq=False, slots=True)
class _RequestTimes:
    offer: Offer
    objectives: TokenObjectives
    is_rejected: bool = False
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    over: int = 0
    longest: float = 0.0
    is_finished: bool = False

    def seen(self, now: float, tokens: int, *, is_finished: bool) -> None:
        """Counts tokens that arrived at `now`, and the gap before them."""
        if self.first is None:
            self.first = now
        else:
            gap = now - self.last
            self.longest = max(self.longest, gap)
            self.over += gap > self.objectives.gap
        self.last = now
        self.tokens += tokens
        self.is_finished = is_finished

    def is_in_time(self) -> bool:
        """Whether it finished and its first token met the TTFT objective."""
        in_time = self.first is not None and self.first - self.offer.at <= self.objectives.ttft
        return self.is_finished and in_time

    def meets_published(self) -> bool:
        """The published metric."""
        allowed = math.floor(0.01 * max(0, self.tokens - 1))
        return self.is_in_time() and self.over <= allowed

    def meets_strict(self) -> bool:
        """The strict metric."""
        return self.is_in_time() and self.over == 0

    def block_seconds(self, block_tokens: int) -> float:
        """Block-seconds from the first to the last token, ignoring pauses; half a block is unused."""
        if self.first is None:
            return 0.0
        blocks = (self.offer.prompt + self.tokens / 2) / block_tokens + 0.5
        return blocks * (self.last - self.first)

    def is_lost(self, now: float) -> bool:
        """Whether both metrics are missed already."""
        return (now if self.first is None else self.first) - self.offer.at > self.objectives.ttft


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of the measured window; the field names are those of the results files.

    `published`, `strict` and `unfinished` are shares of the requests. `longest_gap` in seconds is over all
    requests, `met_gap` over those that met the strict objectives. `missed_wait` holds quantiles over the
    requests that missed and were not rejected: seconds from arrival to the first token, or to the end of the
    run without one. `rejected` is the share that the gate rejected, `by_class` the strict share of each
    class, `embeddings` the share of the embedding passes in time.
    `held_share` and `met_share` are the shares of the memory that the module's docstring defines.
    """

    rate: float
    published: float
    strict: float
    unfinished: float
    preemptions: int
    longest_gap: float
    met_gap: float
    missed_wait: Mapping[str, float]
    held_share: float
    met_share: float
    steps: int
    hook_us: float
    seconds: float
    virtual_seconds: float
    rejected: float = 0.0
    by_class: Mapping[str, float] = field(default_factory=dict)
    embeddings: float | None = None


@dataclass(slots=True)
class _Counts:
    """Sums over the steps of a run; `held` is the held share of the memory times seconds, in the window."""

    has_plugin: bool
    """Whether the scheduler is Tandem's; vLLM's own has no hook."""
    steps: int = 0
    hook_ns: int = 0
    held: float = 0.0
    preemptions: int = 0

    def watch(self, scheduler: Any) -> None:
        """Counts the preemptions by the scheduler, which vLLM's own keeps only for unfinished requests."""
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def stepped(self, scheduler: Any, seconds: float) -> None:
        """Counts one step of the scheduler."""
        self.steps += 1
        if self.has_plugin:
            self.hook_ns += scheduler.hook_ns
        self.held += scheduler.kv_cache_manager.usage * seconds


def play(
    engine: SteppedEngine,
    variant: EngineVariant,
    offers: Iterator[Offer],
    window: ReplayWindow,
    objectives: TokenObjectives,
    rate: float,
    embeddings: EmbeddingsBeside | None = None,
) -> ReplayResult:
    """Runs `offers`, an endless trace, through the window. Raises RuntimeError if the scheduler is stuck."""
    start = perf_counter()
    scheduler = engine.restart(stock=variant.stock, tandem=variant.options, hidden=variant.hidden)
    gate = GateInFront(scheduler) if variant.has_gate else None
    beside = _Passes(embeddings)
    records: dict[str, _RequestTimes] = {}
    last_at = math.inf
    upcoming = next(offers)
    counts, idle = _Counts(variant.options is not None), 0
    counts.watch(scheduler)
    pending: set[str] = set()
    while True:
        now = engine.now_ns / _NS
        while upcoming.at <= now:
            request_id = f"r{len(records)}"
            index = len(records)
            records[request_id] = record = _RequestTimes(upcoming, upcoming.objectives(objectives))
            record.is_rejected = not _send(engine, request_id, record, variant, gate)
            if index in window and not record.is_rejected:
                pending.add(request_id)
            last_at = upcoming.at if index == window.last else last_at
            upcoming = next(offers)
        if now > last_at and (not pending or now > last_at + _TAIL_SECONDS):
            break
        beside.run(engine)
        if not scheduler.requests:
            engine.jump(math.ceil(min(upcoming.at, beside.next_at) * _NS) + 1)
            continue
        produced = engine.step()
        if gate is not None:
            gate.stepped(Instant(engine.now_ns))
        after = engine.now_ns / _NS
        is_open = len(records) > window.warm_up and now <= last_at
        counts.stepped(scheduler, after - now if is_open else 0.0)
        idle = idle + 1 if after == now else 0
        if idle > _STUCK_STEPS:
            raise RuntimeError(f"{variant.name}: {idle} steps in a row did nothing at {now:.1f} s")
        if idle and not produced:
            # The policy delays all requests; a live engine would call schedule() again at once.
            engine.jump(engine.now_ns + 1_000_000)
        for request_id, tokens, is_finished in produced:
            records[request_id].seen(after, tokens, is_finished=is_finished)
        pending.difference_update(request_id for request_id, _, is_finished in produced if is_finished)
        if now > last_at and counts.steps % 64 == 0:
            pending = {key for key in pending if not records[key].is_lost(after)}
    measured = list(records.values())[window.warm_up : window.last + 1]
    end, seconds = engine.now_ns / _NS, perf_counter() - start
    result = _result(measured, rate, end, counts, seconds, engine.setup)
    return replace(result, embeddings=beside.met_share)


class _Passes:
    """Poisson embedding passes that take the device between two steps of the engine, oldest first."""

    def __init__(self, load: EmbeddingsBeside | None) -> None:
        self._load = load
        self._random = Random(0)
        self._passes = 0
        self._kept = 0
        self.next_at = math.inf if load is None else 0.0

    @property
    def met_share(self) -> float | None:
        """Share of the passes that ended in time; None without any."""
        return self._kept / self._passes if self._passes else None

    def run(self, engine: SteppedEngine) -> None:
        """Runs the oldest pass that has arrived, if there is one."""
        load, now = self._load, engine.now_ns / _NS
        if load is None or self.next_at > now:
            return
        engine.jump(engine.now_ns + round(load.pass_seconds * _NS))
        self._passes += 1
        self._kept += engine.now_ns / _NS - self.next_at <= load.objective
        self.next_at += self._random.expovariate(load.device_share / load.pass_seconds)


def _send(
    engine: SteppedEngine,
    request_id: str,
    record: _RequestTimes,
    variant: EngineVariant,
    gate: GateInFront | None,
) -> bool:
    """Adds the request to the engine unless the gate rejects it; returns whether it was added."""
    offer, objectives = record.offer, record.objectives
    metadata: dict[str, Any] = {
        "arrival_ns": round(offer.at * _NS), "ttft_ms": objectives.ttft * 1e3, "gap_ms": objectives.gap * 1e3,
    }  # fmt: skip
    priority = 0
    if (offered := offer.service_class) is not None:
        metadata |= {"class": offered.name, "priority": offered.priority}
        if variant.weights is not None:
            metadata["weight"] = variant.weights[offered.priority]
        priority = -offered.priority if variant.stock == "priority" else 0
    if offer.predicted is not None:
        metadata["tokens"] = offer.predicted
        if offer.forecast is not None:
            metadata |= {"levels": list(offer.forecast.levels), "quantiles": list(offer.forecast.tokens)}
        if offered is None and variant.stock == "priority":
            priority = offer.predicted
    limit = engine.setup.max_model_tokens - offer.prompt
    if gate is not None:
        now = Instant(engine.now_ns)
        state = make_engine_request(
            metadata,
            Defaults(),
            request_id=request_id,
            prompt_tokens=offer.prompt,
            max_tokens=limit,
            now=now,
        )
        if gate.rejects(state, now):
            return False
    engine.add(
        request_id, offer.prompt, offer.output, extra={"tandem": metadata}, priority=priority, limit=limit
    )
    return True


def _result(
    measured: list[_RequestTimes],
    rate: float,
    end: float,
    counts: _Counts,
    seconds: float,
    setup: SteppedEngineSetup,
) -> ReplayResult:
    count = len(measured)
    met = [r for r in measured if r.meets_strict()]
    lost = [r for r in measured if not r.meets_strict() and not r.is_rejected]
    kept: dict[str, list[bool]] = {}
    for r in measured:
        if r.offer.service_class is not None:
            kept.setdefault(r.offer.service_class.name, []).append(r.meets_strict())
    waits = [(end if r.first is None else r.first) - r.offer.at for r in lost] or [0.0]
    span = measured[-1].offer.at - measured[0].offer.at
    earned = sum(r.block_seconds(setup.block_tokens) for r in met)
    gaps = [max(r.longest, 0.0 if r.is_finished or r.first is None else end - r.last) for r in measured]
    return ReplayResult(
        rate=rate,
        published=sum(r.meets_published() for r in measured) / count,
        strict=len(met) / count,
        unfinished=sum(not r.is_finished for r in measured) / count,
        preemptions=counts.preemptions,
        longest_gap=max(gaps),
        met_gap=max((r.longest for r in met), default=0.0),
        missed_wait={f"p{level}": nearest_rank(waits, level / 100) for level in (50, 95, 100)},
        held_share=counts.held / span,
        met_share=earned / (setup.blocks * span),
        steps=counts.steps,
        hook_us=counts.hook_ns / max(1, counts.steps) / 1e3,
        seconds=seconds,
        virtual_seconds=end,
        rejected=sum(r.is_rejected for r in measured) / count,
        by_class={name: sum(each) / len(each) for name, each in sorted(kept.items())},
    )
