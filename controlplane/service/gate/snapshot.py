"""Builds the immutable PoolView that one scheduling cycle decides on."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from controlplane.core.clock import Duration, Instant, scaled
from controlplane.core.memory_ledger import Footprint, Lease, LeaseTable, MemoryLedger
from controlplane.core.pool_view import DecodeLoad, Pace, PoolView, Queue, Running, Share
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Kind, Owner, Phase, Request
from controlplane.service.decision_history import Preempted
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.engine_lease_sync import EngineLeases, EngineQueueView
from controlplane.service.gate.prefix_leases import PrefixLeases
from controlplane.service.gate.time_pricing import TimePricing
from controlplane.service.prediction.ttft_forecasts import TtftPredictor
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import StepReports, StepWork
from predictors.timing.pace_estimators import PaceEstimators


@dataclass(eq=False, slots=True)
class SnapshotBuilder:
    """Reads leases, tickets and engines into a view; decides nothing and opens no lease.

    `tickets` is the dispatcher's table. `engine_leases` is None if vLLM's own scheduler runs.
    """

    ledger: MemoryLedger
    tickets: Mapping[str, Ticket]
    generators: Mapping[str, Generator]
    encoders: EncoderRegistry
    pace_estimators: PaceEstimators
    engine_leases: EngineLeases | None
    ttft: TtftPredictor
    prefixes: PrefixLeases
    time_pricing: TimePricing
    largest: dict[Owner, int] = field(init=False, default_factory=dict)
    """The most bytes that one request may ever have, for owners whose quota changes."""

    def pool(self, queues: Mapping[Owner, Queue], now: Instant, *, engine_queue: int) -> PoolView:
        """The view of all owners for which requests wait.

        `engine_queue` requests may be forwarded to an LLM engine beyond its free slots.
        """
        extra = {Owner.LLM: engine_queue, Owner.EMBEDDING: 0}
        owners = [owner for owner, queue in queues.items() if queue.waiting]
        return PoolView({owner: self.share(owner, extra[owner], now) for owner in owners}, queues)

    def preemptible(self, now: Instant) -> tuple[Running, ...]:
        """The decoding requests that can resume by recompute."""
        pace = self.pace_estimators.llm.pace
        return tuple(
            self._running(ticket, ticket.lease, pace, now)
            for ticket in self.tickets.values()
            if ticket.lease is not None and ticket.is_resumable and ticket.phase is Phase.DECODE
        )

    def _running(self, ticket: Ticket, lease: Lease, pace: Pace | None, now: Instant) -> Running:
        held_bytes, remaining_steps = self.ledger.lease_state(lease)
        shared_tokens, shared_bytes = self.prefixes.shared(ticket)
        return ticket.as_running(
            now,
            pace,
            freed_bytes=held_bytes - shared_bytes,
            remaining_steps=remaining_steps,
            shared_tokens=shared_tokens,
        )

    def preemption(self, ticket: Ticket, beneficiary: str | None, now: Instant) -> Preempted:
        """The record of a preemption by the gate, and what it costs; the ticket's lease is still open."""
        done = ticket.request.prompt_tokens + ticket.timeline.output_tokens - self.prefixes.shared(ticket)[0]
        pace = self.pace_estimators.of(ticket.request.kind.owner).pace
        gainer = self.tickets.get(beneficiary or "")
        return Preempted(
            now,
            "gate",
            beneficiary,
            recompute_tokens=done,
            recompute=None if pace is None else scaled(pace.per_prompt_token, done),
            freed_bytes=None if ticket.lease is None else self.ledger.lease_state(ticket.lease)[0],
            beneficiary_class=None if gainer is None else gainer.request.service_class.name,
        )

    def service_time(self, ticket: Ticket) -> Duration | None:
        """The time for which its owner would be busy with a request; None before any step was observed."""
        owner = ticket.request.kind.owner
        pace = self.pace_estimators.of(owner).pace_of(ticket.request.model)
        if pace is None:
            return None
        ceiling = self.ledger.ceiling(owner)
        return service_time(ticket.request, ticket.footprint, pace, ceiling, self.slots(owner))

    def _embedding_paces(self) -> Mapping[str, Pace | None]:
        """The pace of each embedding model; empty for a single model, whose pace is the owner's."""
        paces = self.pace_estimators.embedding
        return {model: paces.pace_of(model) for model in self.encoders} if len(self.encoders) > 1 else {}

    def slots(self, owner: Owner) -> int:
        """Places in the running backends of an owner; a request takes one for each of its choices."""
        backends: Collection[Generator | Embedder]
        backends = self.generators.values() if owner is Owner.LLM else self.encoders.running
        return sum(backend.max_running for backend in backends)

    def share(self, owner: Owner, extra_slots: int, now: Instant) -> Share:
        """The part of one owner; `extra_slots` requests may be forwarded beyond the engine's free slots."""
        ledger, leases = self.ledger, self.ledger.table(owner)
        used_slots = sum([self.tickets[name].request.choices for name in leases.ids])
        share = partial(
            Share,
            ceiling=ledger.ceiling(owner),
            held=ledger.held(owner),
            deficit=ledger.deficit(owner),
            largest=self.largest.get(owner, ledger.quota(owner)),
            free_slots=self.slots(owner) + extra_slots - used_slots,
            leases=leases,
            pace=self.pace_estimators.of(owner).pace,
        )
        if owner is Owner.EMBEDDING:
            return share(
                is_serial=True,
                paces=self._embedding_paces(),
                last_passes=self.pace_estimators.embedding.last_passes(),
                calls=tuple(embedding_calls_in_flight(self.tickets.values())) if leases.ids else (),
                is_device_shared=ledger.count(Owner.LLM) > 0,
                time_price=self.time_pricing.per_second(now),
            )
        free_bytes = ledger.ceiling(owner) - ledger.held(owner)
        planned = None if self.engine_leases is None else self.engine_leases.planned
        reports = self.pace_estimators.llm
        load = decode_load(self.tickets.values(), leases, free_bytes, reports, now, planned=planned)
        share = partial(share, decode_load=load, wait_optimism=self.ttft.optimism)
        if self.engine_leases is None:
            return share(preemptible=partial(self.preemptible, now))
        engine = EngineQueueView(self.engine_leases, leases)
        return share(engine_work_ahead=engine.work_ahead, engine_keeps=engine.keeps)


def embedding_calls_in_flight(tickets: Iterable[Ticket]) -> Iterator[tuple[Request, float]]:
    """The admitted embedding requests, each with its tokens that are not computed yet."""
    for ticket in tickets:
        request = ticket.request
        if ticket.lease is not None and ticket.embedder is not None:
            left = ticket.embedder.tokens_left(request.id)
            # None: the request was admitted just now and is on its way to the worker.
            yield request, request.prompt_tokens if left is None else left


def decode_load(
    tickets: Iterable[Ticket],
    leases: LeaseTable,
    free_bytes: int,
    reports: StepReports,
    now: Instant,
    *,
    planned: Instant | None = None,
) -> DecodeLoad | None:
    """Load of the LLM's steps now, and the TPOT budget left to each running request.

    `planned` is when the engine last planned a step whose report has arrived. None until enough steps were
    reported, since an a-priori cost model must not delay requests.
    """
    if not reports.reports_steps:
        return None
    sequences = cells = prefill_tokens = 0
    budgets: list[float] = []
    tokens: list[float] = []
    tpots: list[Duration] = []
    priority: list[int] = []
    started, unclaimed_bytes = _started_generations(tickets, leases, free_bytes, planned)
    for ticket, remaining in started:
        request, timeline = ticket.request, ticket.timeline
        done, first, copies = timeline.output_tokens, timeline.first_token, request.sequences
        sequences += copies
        cells += copies * (request.prompt_tokens + done)
        if first is None:
            prefill_tokens += request.prefill_tokens
        if (tpot := request.slo.tpot) is not None:
            # The time to the last token at which TPOT is met. The step of the first token counts as one more,
            # as in `DecodeLoad.with_request`.
            since, tokens_since = (now, remaining) if first is None else (first, done + remaining - 1)
            budgets.append(tpot * tokens_since + since - now)
            tokens.append(remaining)
            tpots.append(tpot)
            priority.append(request.service_class.priority)
    steps = reports.steps
    return DecodeLoad(
        step=lambda sequences, cells: steps.predict(StepWork(0, sequences, cells)) * 1e9,
        per_prompt_token=steps.per_prompt_token * 1e9,
        prefill_share=reports.prefill_share,
        prefill_deviation=reports.prefill_deviation * 1e9,
        sequences=sequences,
        cells=cells,
        prompt_tokens_pending=prefill_tokens,
        time_left=np.array(budgets, dtype=np.float64),
        tokens=np.array(tokens, dtype=np.float64),
        tpot_objectives=np.array(tpots, dtype=np.float64),
        priority=np.array(priority, dtype=np.float64),
        unclaimed_bytes=max(0.0, unclaimed_bytes),
    )


def _started_generations(
    tickets: Iterable[Ticket], leases: LeaseTable, free_bytes: int, planned: Instant | None
) -> tuple[list[tuple[Ticket, int]], int]:
    """Generations that the next step computes, each with its remaining steps; and the bytes that none needs.

    An engine with Tandem's scheduler starts requests itself: those without blocks count as long as they fit,
    since they start in the next step; the others wait for memory and lengthen no step. Nor does a request
    without blocks that was forwarded before `planned`: the engine has planned a step with it and does not
    start it. The bytes that none needs are negative if the requests without blocks need more than is free.
    """
    # In columns, since this runs in every cycle and a lookup in the ledger per lease takes five times as
    # long.
    columns = zip(leases.base.tolist(), leases.steps.tolist(), strict=True)
    states = dict(zip(leases.ids, columns, strict=True))
    started, unclaimed_bytes, generate = [], free_bytes, Kind.GENERATE
    for ticket in tickets:
        if ticket.lease is None or ticket.request.kind is not generate:
            continue
        held, remaining = states[ticket.request.id]
        if not held:
            unclaimed_bytes -= ticket.footprint.base
            forwarded = ticket.timeline.dispatched
            if planned is not None and forwarded is not None and forwarded < planned:
                continue
            free_bytes -= ticket.footprint.base
            if free_bytes < 0:
                continue
        started.append((ticket, remaining))
    return started, unclaimed_bytes


def service_time(
    request: Request, footprint: Footprint, pace: Pace, quota_bytes: int, slots: int
) -> Duration:
    """Time that a request would keep its owner busy.

    For embeddings, which are computed one after another, the time of its tokens. For generation the time of
    its prompt plus its steps times its share of the memory or of the `slots`, whichever is larger.
    """
    prefill = scaled(pace.per_prompt_token, request.prefill_tokens)
    if request.kind is Kind.EMBED:
        return prefill
    steps = max(footprint.area / max(1, quota_bytes), footprint.steps * request.sequences / max(1, slots))
    return Duration(scaled(pace.step, steps) + prefill)
