"""Immutable snapshot of the pool that policies decide on; a hypothetical state is a new snapshot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from controlplane.core.clock import Duration, Instant, between
from controlplane.core.deadlines import Progress
from controlplane.core.memory_ledger import Floats, Footprint, LeaseTable
from controlplane.core.request import Owner, Request

_OLD_AFTER = 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without a lease.

    It is decided at `until` at the latest (None: it was accepted before and waits without a bound). Queues
    are sorted by `rank`, smallest first. `work` is its part of the owner's backlog: byte-steps, or tokens for
    a serial owner.
    """

    request: Request
    footprint: Footprint
    until: Instant | None
    rank: tuple[int, int, str]
    work: float


@dataclass(frozen=True, slots=True)
class Running:
    """A lease as a possible victim.

    `slack` is the time left to its next deadline: None without one or if its SLO cannot be met any more, 0 if
    it is behind its TPOT and can recover. `recompute` is the work that a preemption discards, `freed_bytes`
    the memory that it frees.
    """

    request_id: str
    priority: int
    freed_bytes: int
    slack: Duration | None
    recompute: Duration
    remaining_steps: int
    preemptions: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Pace:
    """Present times of an engine: of a step or embedding pass, and of each prompt token in addition."""

    step: Duration
    per_prompt_token: Duration

    def is_old(self, last_end: Instant, now: Instant, tokens: float) -> bool:
        """Whether no step or pass has ended for 20 times as long as one of so many tokens takes.

        One that is made only to learn the speed anew then takes at most 5 % of the time.
        """
        return between(last_end, now) >= _OLD_AFTER * (self.step + self.per_prompt_token * tokens)


UNKNOWN_PACE = Pace(Duration(0), Duration(0))
"""That of an engine before its first step."""


@dataclass(frozen=True, slots=True)
class HiddenStateCost:
    """Seconds that hidden states add to an engine step, in addition to KV.

    Per token on hidden states, per request, and once per step if there are any.
    """

    token: float
    request: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Load of an engine's decode steps and the TPOT objectives that they must meet.

    Times are in ns. The columns, float64 [n], have a row for each running request with a TPOT.
    """

    step: Callable[[int, int], float]
    """Time of a step that decodes so many sequences, which read so many KV cells."""
    per_prompt_token: float
    prefill_share: float
    """Share of step time that prefills take."""
    prefill_deviation: float
    """Standard deviation of the prefill time per step."""
    sequences: int
    cells: int
    prompt_tokens_pending: int
    """Prompt tokens to prefill before the prompt of a new request."""
    time_left: Floats
    """Time until the last token is due by the TPOT."""
    tokens: Floats
    """Output tokens to come."""
    tpot_objectives: Floats
    priority: Floats
    unclaimed_bytes: float = inf
    """Bytes that neither running nor forwarded requests need."""

    @property
    def tightest(self) -> float | None:
        """Smallest TPOT objective in ns; None without any."""
        return float(self.tpot_objectives.min()) if len(self.tpot_objectives) else None

    def to_classes_from(self, priority: int) -> "DecodeLoad":
        """The load with only the objectives of classes of at least `priority`."""
        is_counted = self.priority >= priority
        if is_counted.all():
            return self
        columns = {
            name: getattr(self, name)[is_counted]
            for name in ("time_left", "tokens", "tpot_objectives", "priority")
        }
        return replace(self, **columns)

    @property
    def present_step(self) -> float:
        """Time of a step of the present load, in ns."""
        return self.step(self.sequences, self.cells)

    def step_with(self, request: Request) -> float:
        """Time of a step in which this request decodes too, in ns."""
        cells = self.cells + request.sequences * request.prompt_tokens
        return self.step(self.sequences + request.sequences, cells)

    @property
    def backlog(self) -> Duration:
        """Time before the prefill of a new prompt starts: half a step on average, and the pending prompts."""
        return Duration(round(0.5 * self.present_step + self.prompt_tokens_pending * self.per_prompt_token))

    def with_request(self, request: Request, footprint: Footprint) -> "DecodeLoad":
        """The load with this request in the engine, whether or not memory is free for it."""
        tokens = footprint.steps
        load = replace(
            self,
            sequences=self.sequences + request.sequences,
            cells=self.cells + request.sequences * request.prompt_tokens,
            prompt_tokens_pending=self.prompt_tokens_pending + request.prefill_tokens,
        )
        if (tpot := request.slo.tpot) is None:
            return load
        return replace(
            load,
            time_left=np.append(self.time_left, float(tpot * tokens)),
            tokens=np.append(self.tokens, float(tokens)),
            tpot_objectives=np.append(self.tpot_objectives, float(tpot)),
            priority=np.append(self.priority, float(request.service_class.priority)),
        )


def _no_victims() -> tuple[Running, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Share:
    """One owner's part of the pool, in bytes: its memory, its leases and how fast it serves them."""

    ceiling: int
    held: int
    deficit: int
    """Bytes that the leases need and the pool lacks."""
    largest: int
    """The most bytes that a single request may need."""
    free_slots: int
    leases: LeaseTable
    pace: Pace | None = None
    """None before any observation."""
    paces: Mapping[str, Pace | None] = field(default_factory=dict)
    """Those of a serial owner's models, if it has several."""
    is_serial: bool = False
    """Whether its leases are served one after another (embeddings) and not all at once (generation)."""
    is_device_shared: bool = False
    """Whether the other owner has leases too."""
    preemptible: Callable[[], tuple[Running, ...]] = _no_victims
    """Lists the possible victims; on demand, because the list is costly and few requests need it."""
    engine_work_ahead: Callable[[Waiting], float] | None = None
    """Work of the requests that wait in the engine and precede this one; None unless the engine schedules by
    itself."""
    engine_keeps: Callable[[Waiting], LeaseTable] | None = None
    """Leases that the engine would not preempt for this request; None: all."""
    calls: tuple[tuple[Request, float], ...] = ()
    """Calls that a serial owner holds, each with its tokens to compute."""
    last_passes: Mapping[str, Instant] = field(default_factory=dict)
    """When the last pass of each of a serial owner's models ended."""
    time_price: float = 0.0
    """Weighted SLOs that generations lose for each second of the device that a serial owner takes."""
    decode_load: DecodeLoad | None = None
    """None for embeddings, and before steps were observed."""
    wait_optimism: float = 1.0
    """0.1 quantile of actual over predicted time to first token of recent requests that waited, at most 1."""

    def pace_of(self, model: str) -> Pace | None:
        """Pace of one model; the owner's if it has only one."""
        return self.paces.get(model, self.pace)

    def slowness(self, model: str) -> float:
        """Time per token of this model relative to the owner's pace."""
        own = self.pace_of(model)
        if own is None or self.pace is None or not self.pace.per_prompt_token:
            return 1.0
        return own.per_prompt_token / self.pace.per_prompt_token

    def work(self, waiting: Sequence[Waiting]) -> float:
        """Total work of these requests at the owner's pace."""
        if not self.paces:
            return sum([w.work for w in waiting])
        return sum([w.work * self.slowness(w.request.model) for w in waiting])

    def tokens_left(self) -> float:
        """Tokens that a serial owner's calls still have to compute, at the owner's pace."""
        return sum(tokens * self.slowness(request.model) for request, tokens in self.calls)

    def with_lease(self, waiting: Waiting) -> "Share":
        """The share after this request was admitted."""
        request, footprint = waiting.request, waiting.footprint
        load = None if self.decode_load is None else self.decode_load.with_request(request, footprint)
        if self.engine_work_ahead is not None:
            # The request holds nothing before the engine starts it.
            return replace(self, free_slots=self.free_slots - request.choices, decode_load=load)
        return replace(
            self,
            held=self.held + footprint.base,
            free_slots=self.free_slots - request.choices,
            leases=self.leases.with_lease(request.id, footprint, request.service_class.priority),
            calls=(*self.calls, (request, request.prompt_tokens)) if self.is_serial else (),
            decode_load=load,
        )

    def without(self, request_ids: Sequence[str]) -> "Share":
        """The share after these leases were closed."""
        leases = self.leases.without(request_ids)
        freed = int(self.leases.base.sum() - leases.base.sum())
        return replace(
            self,
            held=self.held - max(0, freed - self.deficit),
            deficit=max(0, self.deficit - freed),
            free_slots=self.free_slots + len(self.leases) - len(leases),
            leases=leases,
            calls=tuple(held for held in self.calls if held[0].id not in request_ids),
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """Waiting requests of one owner, sorted by rank.

    `undecided` are those that no cycle has decided yet and those whose wait has ended; the others keep their
    decision.
    """

    waiting: Sequence[Waiting]
    undecided: Sequence[Waiting]


@dataclass(frozen=True, slots=True)
class PoolView:
    """The whole pool: shares and queues by owner."""

    shares: Mapping[Owner, Share]
    queues: Mapping[Owner, Queue]
