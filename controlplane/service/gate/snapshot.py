"""What do the policies get to see? Leases, tickets and engines as one immutable view, made for each cycle."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from controlplane.core.clock import Duration, Instant, scaled
from controlplane.core.memory import Footprint, MemoryLedger
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Kind, Owner, Phase, Request
from controlplane.core.view import DecodeLoad, Pace, PoolView, Queue, Reserve, Running, Share
from controlplane.service.gate.engine_leases import EngineLeases
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import ObservedPace, ReportedPace, StepReports, StepWork

Paces = dict[Owner, ObservedPace | ReportedPace]


@dataclass(eq=False, slots=True)
class SnapshotBuilder:
    """Changes nothing. `tickets` is the dispatcher's own table; `engine_leases` is None where no engine orders."""

    ledger: MemoryLedger
    tickets: Mapping[str, Ticket]
    generators: Mapping[str, Generator]
    embedders: Mapping[str, Embedder]
    paces: Paces
    engine_leases: EngineLeases | None
    largest: dict[Owner, int] = field(init=False, default_factory=dict)
    """The most that a single request could ever have, where that is not the present quota."""
    reserved: dict[Owner, Reserve | None] = field(init=False, default_factory=dict)
    """Memory kept from those of lower priority."""

    def pool(self, queues: Mapping[Owner, Queue], now: Instant, *, engine_queue: int) -> PoolView:
        """`engine_queue` requests more than it has places for may be sent to an LLM engine."""
        extra = {Owner.LLM: engine_queue, Owner.EMBEDDING: 0}
        waited_for = [owner for owner, queue in queues.items() if queue.waiting]
        return PoolView({owner: self._share(owner, extra[owner], now) for owner in waited_for}, queues)

    def preemptible(self, owner: Owner, now: Instant) -> tuple[Running, ...]:
        pace = self.paces[owner].pace
        return tuple(
            ticket.as_running(now, *self.ledger.lease_state(ticket.lease), pace)
            for ticket in self.tickets.values()
            if ticket.lease is not None and ticket.is_resumable and ticket.phase is Phase.DECODE
        )

    def service_time(self, ticket: Ticket) -> Duration | None:
        """How long its owner would be busy with it; None before anything was observed."""
        owner = ticket.request.kind.owner
        pace, ceiling = self.paces[owner].pace_of(ticket.request.model), self.ledger.ceiling(owner)
        if pace is None:
            return None
        return service_time(ticket.request, ticket.footprint, pace, ceiling, self._slots(owner))

    def _embedding_paces(self) -> Mapping[str, Pace | None]:
        """Of one model alone it is the owner's."""
        pace = self.paces[Owner.EMBEDDING]
        return {model: pace.pace_of(model) for model in self.embedders} if len(self.embedders) > 1 else {}

    def _slots(self, owner: Owner) -> int:
        backends: Collection[Generator | Embedder]
        backends = (self.generators if owner is Owner.LLM else self.embedders).values()
        return sum(backend.max_running for backend in backends)

    def _share(self, owner: Owner, extra_slots: int, now: Instant) -> Share:
        ledger, quota = self.ledger, self.ledger.quota(owner)
        leases = ledger.table(owner)
        ceiling = ledger.ceiling(owner)
        share = Share(
            ceiling=ceiling,
            held=ledger.held(owner),
            deficit=ledger.deficit(owner),
            largest=self.largest.get(owner, quota.nominal),
            reserve=self.reserved.get(owner),
            free_slots=self._slots(owner) + extra_slots - len(leases),
            leases=leases,
            pace=self.paces[owner].pace,
            is_serial=owner is Owner.EMBEDDING,
            preemptible=lambda: self.preemptible(owner, now),
        )
        if owner is Owner.EMBEDDING:
            return replace(
                share,
                paces=self._embedding_paces(),
                calls=tuple(embedding_calls_in_flight(self.tickets.values(), self.embedders)),
                is_beside_others=len(ledger.table(Owner.LLM)) > 0,
            )
        share = replace(share, decode_load=decode_load(self.tickets.values(), share, self.paces[owner], now))
        if self.engine_leases is not None:
            return replace(share, preemptible=tuple, inside=self.engine_leases.work_ahead)
        return share


# FOLDED in_turn.py:
# What does an embedding engine hold, and how much of it is still to be computed?


def embedding_calls_in_flight(
    tickets: Iterable[Ticket], embedders: Mapping[str, Embedder]
) -> Iterator[tuple[Request, float]]:
    """Those that were let in, each with its tokens less what is computed."""
    for ticket in tickets:
        request = ticket.request
        if ticket.lease is not None and request.kind is Kind.EMBED:
            left = embedders[request.model].tokens_left(request.id)
            # One that was let in just now is on its way.
            yield request, request.prompt_tokens if left is None else left


# FOLDED tempo.py:
# How fast must the engine go on? What its steps carry now, and what is left of each promised pace.
#
# Where the engine itself holds back, those that hold nothing count as far as there is room for them: they
# start
# in the very next step. The others wait for memory, and make no step longer.


def decode_load(
    tickets: Iterable[Ticket], share: Share, paces: StepReports, now: Instant
) -> DecodeLoad | None:
    """Of an LLM's share. None until enough steps were reported: what is only thought of an engine holds
    nobody back."""
    if not paces.reports_steps:
        return None
    sequences = cells = unread = 0
    room = share.ceiling - share.held
    left: list[float] = []
    tokens: list[float] = []
    promised: list[Duration] = []
    priority: list[int] = []
    leases = share.leases
    # For each cycle: to ask the ledger of one lease after the other takes five times as long.
    columns = zip(leases.base.tolist(), leases.steps.tolist(), strict=True)
    standing = dict(zip(leases.ids, columns, strict=True))
    for ticket in tickets:
        if ticket.lease is None or (request := ticket.request).kind is not Kind.GENERATE:
            continue
        held, to_go = standing[request.id]
        if not held:
            room -= ticket.footprint.base
            if room < 0:
                continue
        done, first = ticket.timeline.output_tokens, ticket.timeline.first_token
        sequences += request.sequences
        cells += request.sequences * (request.prompt_tokens + done)
        if first is None:
            unread += request.prompt_tokens
        if (tpot := request.slo.tpot) is not None:
            # `Ticket.slack`, and as much for each token to come but the next; 0 before the first.
            left.append(tpot * (done + to_go - 1) + (0 if first is None else first - now))
            tokens.append(to_go)
            promised.append(tpot)
            priority.append(request.service_class.priority)
    steps = paces.steps
    return DecodeLoad(
        step=lambda sequences, cells: steps.predict(StepWork(0, sequences, cells)) * 1e9,
        per_prompt_token=steps.per_prompt_token * 1e9,
        lost_share=paces.lost_share,
        lost_deviation=paces.lost_deviation * 1e9,
        sequences=sequences,
        cells=cells,
        unread=unread,
        left=np.array(left, dtype=np.float64),
        tokens=np.array(tokens, dtype=np.float64),
        promised=np.array(promised, dtype=np.float64),
        priority=np.array(priority, dtype=np.float64),
    )


def service_time(
    request: Request, footprint: Footprint, pace: Pace, quota_bytes: int, slots: int
) -> Duration:
    """How long its owner would be busy with it: by tokens where they are worked off one after another, else
    by its part of the memory or of the `slots` over its steps, whichever is more, and by its prompt."""
    reading = scaled(pace.per_prompt_token, request.prompt_tokens)
    if request.kind is Kind.EMBED:
        return reading
    steps = max(footprint.area / max(1, quota_bytes), footprint.steps * request.sequences / max(1, slots))
    return Duration(scaled(pace.step, steps) + reading)
