"""What do the policies get to see? Leases, tickets and engines as one immutable view, made for each cycle."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory import MemoryLedger
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Owner, Phase
from controlplane.core.view import Pace, PoolView, Queue, Reserve, Running, Share
from controlplane.service.gate.engine_leases import Inside
from controlplane.service.gate.fair_queueing import alone
from controlplane.service.gate.in_turn import calls_inside
from controlplane.service.gate.tempo import tempo_of
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import ObservedPace, ReportedPace

Paces = dict[Owner, ObservedPace | ReportedPace]


@dataclass(eq=False, slots=True)
class Sight:
    """Changes nothing. `tickets` is the dispatcher's own table; `inside` is None where no engine orders."""

    ledger: MemoryLedger
    tickets: Mapping[str, Ticket]
    generators: Mapping[str, Generator]
    embedders: Mapping[str, Embedder]
    paces: Paces
    inside: Inside | None
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
            ticket.as_running(now, *self.ledger.standing(ticket.lease), pace)
            for ticket in self.tickets.values()
            if ticket.lease is not None and ticket.is_resumable and ticket.phase is Phase.DECODE
        )

    def alone(self, ticket: Ticket) -> Duration | None:
        """How long its owner would be busy with it; None before anything was observed."""
        owner = ticket.request.kind.owner
        pace, ceiling = self.paces[owner].pace_of(ticket.request.model), self.ledger.ceiling(owner)
        if pace is None:
            return None
        return alone(ticket.request, ticket.footprint, pace, ceiling, self._slots(owner))

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
                calls=tuple(calls_inside(self.tickets.values(), self.embedders)),
                is_beside_others=len(ledger.table(Owner.LLM)) > 0,
            )
        share = replace(share, tempo=tempo_of(self.tickets.values(), share, self.paces[owner], now))
        if self.inside is not None:
            return replace(share, preemptible=tuple, inside=self.inside.work_before)
        return share
