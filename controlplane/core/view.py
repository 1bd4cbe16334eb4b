"""What may a policy see? An immutable snapshot; asking "what if" gives a new one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory import Floats, Footprint, LeaseTable
from controlplane.core.request import Owner, Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without a lease. `until` bounds its wait (None: accepted before, it waits as long as it
    takes); queues are sorted by `rank`, smallest first. `work` is its share of what the owner works
    off: byte-steps, or steps alone where the owner is serial."""

    request: Request
    footprint: Footprint
    until: Instant | None
    rank: tuple[int, int, str]
    work: float


@dataclass(frozen=True, slots=True)
class Running:
    """A lease as a possible victim. `slack` is what is left before its next deadline (None: it has
    none), `recompute` the work that preempting it throws away, `freed_bytes` what that gives back."""

    request_id: str
    priority: int
    freed_bytes: int
    slack: Duration | None
    recompute: Duration
    remaining_steps: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an owner works now: one engine step, and one prompt token beside it."""

    step: Duration
    per_prompt_token: Duration


@dataclass(frozen=True, slots=True)
class HiddenStateCost:
    """Seconds that hidden states add to an engine step, beside keys and values: each token on them, each
    request, and that there are any."""

    token: float
    request: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes kept for requests of at least this priority that are expected soon."""

    reserved_bytes: int
    priority: int


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What an engine's steps carry, and how fast they must go on. `step` is what one takes, in nanoseconds,
    by the sequences in it and the cells that they read; `unread` prompt tokens are to be computed first,
    each for `per_prompt_token`. Decoding loses `lost_share` of all time to prompts and embeddings, with
    `lost_deviation` a step. Of each answer that was promised a pace: the time `left` to its last token, and
    the `tokens` until then, the time `promised` for each, and the `priority` of its class."""

    step: Callable[[int, int], float]
    per_prompt_token: float
    lost_share: float
    lost_deviation: float
    sequences: int
    cells: int
    unread: int
    left: Floats
    tokens: Floats
    promised: Floats
    priority: Floats

    @property
    def tightest(self) -> float | None:
        """The shortest time a token that somebody was promised."""
        return float(self.promised.min()) if len(self.promised) else None

    def to_higher(self, priority: int) -> "DecodeLoad":
        """Only what was promised to classes of a higher priority."""
        is_higher = self.priority > priority
        columns = {
            name: getattr(self, name)[is_higher] for name in ("left", "tokens", "promised", "priority")
        }
        return replace(self, **columns)

    def until_read(self, request: Request) -> Duration:
        """To its first token: half of the step under way, on average, and one that reads all prompts."""
        step = self.step(self.sequences, self.cells)
        return Duration(round(1.5 * step + (self.unread + request.prompt_tokens) * self.per_prompt_token))

    def with_one(self, request: Request, tokens: int) -> "DecodeLoad":
        """Had this request started, `tokens` being what it is predicted to answer."""
        load = replace(
            self,
            sequences=self.sequences + request.sequences,
            cells=self.cells + request.sequences * request.prompt_tokens,
            unread=self.unread + request.prompt_tokens,
        )
        if (tpot := request.slo.tpot) is None:
            return load
        return replace(
            load,
            left=np.append(self.left, float(tpot * tokens)),
            tokens=np.append(self.tokens, float(tokens)),
            promised=np.append(self.promised, float(tpot)),
            priority=np.append(self.priority, float(request.service_class.priority)),
        )


def _no_victims() -> tuple[Running, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Share:
    """One owner's part of the pool, in bytes. `largest` is the most a single request could ever have;
    `pace` is None until something was observed; a serial owner works its leases off one after another, any
    other all at once; `paces` are those of a serial owner's models, where it has several. `is_beside_others`
    while the device works for the other kind, too. `preemptible` lists possible victims when asked: only a
    request that would preempt pays for the list. `inside` is given where the engine itself holds requests
    back: the work of those that wait in it and go before this one. `calls` are what a serial owner holds,
    each with the tokens still to be computed. `decode_load` is given for answers, once steps
    were observed."""

    ceiling: int
    held: int
    deficit: int
    largest: int
    free_slots: int
    leases: LeaseTable
    pace: Pace | None = None
    paces: Mapping[str, Pace | None] = field(default_factory=dict)
    is_serial: bool = False
    is_beside_others: bool = False
    reserve: Reserve | None = None
    preemptible: Callable[[], tuple[Running, ...]] = _no_victims
    inside: Callable[[Waiting], float] | None = None
    calls: tuple[tuple[Request, float], ...] = ()
    decode_load: DecodeLoad | None = None

    def pace_of(self, model: str) -> Pace | None:
        return self.paces.get(model, self.pace)

    def slowness(self, model: str) -> float:
        """What a token takes of this model, counted in tokens at the owner's own pace."""
        own = self.pace_of(model)
        if own is None or self.pace is None or not self.pace.per_prompt_token:
            return 1.0
        return own.per_prompt_token / self.pace.per_prompt_token

    def work(self, waiting: Sequence[Waiting]) -> float:
        """Theirs together, at the owner's own pace."""
        if not self.paces:
            return sum([w.work for w in waiting])
        return sum([w.work * self.slowness(w.request.model) for w in waiting])

    def held_steps(self) -> float:
        """Of all leases together, at the owner's own pace."""
        if not self.paces:
            return float(self.leases.steps.sum())
        return sum([request.prompt_tokens * self.slowness(request.model) for request, _ in self.calls])

    def is_kept_for(self, request: Request) -> bool:
        """Whether what is reserved, is reserved for it."""
        return self.reserve is not None and request.service_class.priority >= self.reserve.priority

    def as_seen_by(self, request: Request) -> "Share":
        """Without what is reserved for a higher priority."""
        reserve = self.reserve
        if reserve is None or self.is_kept_for(request):
            return self
        return replace(self, ceiling=max(0, self.ceiling - reserve.reserved_bytes))

    def with_lease(self, waiting: Waiting) -> "Share":
        request, footprint = waiting.request, waiting.footprint
        load = None if self.decode_load is None else self.decode_load.with_one(request, footprint.steps)
        if self.inside is not None:
            # It holds nothing before the engine starts it.
            return replace(self, free_slots=self.free_slots - 1, decode_load=load)
        return replace(
            self,
            held=self.held + footprint.base,
            free_slots=self.free_slots - 1,
            leases=self.leases.with_lease(request.id, footprint, request.service_class.priority),
            calls=(*self.calls, (request, request.prompt_tokens)) if self.is_serial else (),
            decode_load=load,
        )

    def without(self, request_ids: Sequence[str]) -> "Share":
        """What the share would be had these leases been closed."""
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
    """All that wait for one owner, sorted by rank. `undecided` are those that no cycle has decided yet
    and those whose time is up; the others wait on as they were told."""

    waiting: Sequence[Waiting]
    undecided: Sequence[Waiting]


@dataclass(frozen=True, slots=True)
class PoolView:
    shares: Mapping[Owner, Share]
    queues: Mapping[Owner, Queue]
