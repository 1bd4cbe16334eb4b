"""Runs the scheduling cycle over all waiting requests and applies its plan.

A cycle runs on every arrival, release and quota change, after a request that waited has left, and at the
decision deadline of a deferred request. The dispatcher opens leases; every path out closes them through
`Accounting.end`, once. An exception in a policy fails only the requests that were undecided in that cycle;
the others are retried.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from controlplane.core.clock import Clock, Instant, after, seconds
from controlplane.core.decision import Admit, Defer, Outcome, Plan, Reason, Reject
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.pool_view import PoolView, Waiting
from controlplane.core.ports import Generator, PauseCost
from controlplane.core.request import Kind, Owner, Phase
from controlplane.metrics import Metrics
from controlplane.policy.gate.admission import retry_after, wait_bound
from controlplane.policy.gate.preemption import choose_victims
from controlplane.policy.gate.scheduling_cycle import run_cycle
from controlplane.service.decision_history import Basis, Decided, basis_of
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.accounting import Accounting
from controlplane.service.gate.cycle_timer import CycleTimer
from controlplane.service.gate.departures import Departures
from controlplane.service.gate.engine_lease_sync import EngineLeases
from controlplane.service.gate.explanation import DryRun
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.gate.pause_pricing import PausePricing
from controlplane.service.gate.policies import Policies
from controlplane.service.gate.prefix_leases import PrefixLeases
from controlplane.service.gate.rate_limits import RateLimiter
from controlplane.service.gate.retry_after import RetrySpacer
from controlplane.service.gate.snapshot import SnapshotBuilder
from controlplane.service.gate.time_pricing import TimePricing
from controlplane.service.gate.waiting_queue import WaitingQueue
from controlplane.service.prediction.fail_open import GuardedLengthPredictor
from controlplane.service.prediction.ttft_forecasts import TtftPredictor
from controlplane.service.request_recorder import RequestRecorder
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.ticket import DecisionFailed, Ticket
from predictors.timing.embedding_pace import ModelPaces
from predictors.timing.online_step_time import ObservedPace, ReportedPace
from predictors.timing.pace_estimators import PaceEstimators


class Dispatcher:
    """Owns the waiting queue and all tickets; the only writer of the ledger's leases.

    `on_not_admitted` is called with each deferral or rejection by a cycle.
    """

    def __init__(
        self,
        clock: Clock,
        ledger: MemoryLedger,
        policies: Policies,
        generators: Mapping[str, Generator],
        encoders: EncoderRegistry,
        lengths: GuardedLengthPredictor,
        metrics: Metrics,
        rates: RateLimiter,
        tenants: TenantQueues,
        recorder: RequestRecorder,
    ) -> None:
        self._clock = clock
        self._policies = policies
        self._generators = generators
        self._metrics = metrics
        self._tenants = tenants
        self._waiting = WaitingQueue()
        self._tickets: dict[str, Ticket] = {}
        self._timer = CycleTimer(self.decide)
        self._idle = asyncio.Event()
        self._idle.set()
        self._departures = Departures()
        self.health = HealthTracker("requests fail without a decision", "requests are decided again")
        self.ledger = ledger
        self.recorder = recorder
        self.on_not_admitted: Callable[[Owner, Defer | Reject], None] = lambda owner, decision: None
        generator = next(iter(generators.values()), None)
        llm: ObservedPace | ReportedPace = ObservedPace(None if generator is None else generator.step_cost)
        self._engine_leases: EngineLeases | None = None
        if generator is not None and (options := policies.engine_options) is not None:
            self._engine_leases = EngineLeases(generator, ledger, self._tickets, options, recorder)
            llm = self._engine_leases.pace_estimator
        self.pace_estimators = PaceEstimators(llm, ModelPaces(encoders.values()))
        self.ttft = TtftPredictor(generators, self.pace_estimators, self._tickets)
        self.prefixes = PrefixLeases(generators, ledger, follows_engine=self._engine_leases is not None)
        pricing = TimePricing(ledger, llm)
        self._pause_pricing = PausePricing(self._tickets, ledger, llm, self._engine_leases)
        parts = (self.pace_estimators, self._engine_leases, self.ttft, self.prefixes, pricing)
        self.snapshots = SnapshotBuilder(ledger, self._tickets, generators, encoders, *parts)
        self._retry_spacer = RetrySpacer()
        self.accounting = Accounting(
            ledger, metrics, rates, tenants, lengths, llm, self.ttft, generators, self.prefixes, recorder,
        )  # fmt: skip
        self.accounting.on_end.append(pricing.request_ended)

    @property
    def config_version(self) -> int:
        """Number of the configuration that the policies in force follow from."""
        return self._policies.version

    def dry_run(self, entry: Waiting) -> DryRun:
        """Returns the decision of a cycle now on a waiting or hypothetical request; changes nothing."""
        now, admission, owner = self._clock.now(), self._policies.admission, entry.request.kind.owner
        self.sync_engine_leases()
        queue = self._waiting.queue_including(entry)
        view = self.snapshots.pool({owner: queue}, now, engine_queue=self._policies.engine_queue)
        return DryRun(basis_of(entry, view), queue, run_cycle(view, now, admission), now)

    def cap_footprints(self, owner: Owner, max_bytes: int) -> None:
        """Caps the footprints of waiting requests, since batches are cut to a smaller quota."""
        for capped in self._waiting.cap_footprints(owner, max_bytes):
            ticket = self._tickets[capped.request.id]
            ticket.entry, ticket.footprint = capped, capped.footprint

    def reclaim(self, needed_bytes: int, priority: int) -> int:
        """Preempts generations below `priority` that free `needed_bytes`, all or none; returns the bytes."""
        victims = choose_victims(
            self.snapshots.preemptible(self._clock.now()),
            needed_bytes=needed_bytes,
            incoming_priority=priority,
            rank=self._policies.admission.victims,
        )
        for victim in victims:
            self._preempt(victim.request_id, None)
        return sum(victim.freed_bytes for victim in victims)

    def queued(self, owner: Owner) -> Sequence[Waiting]:
        """The waiting requests of `owner`, by rank."""
        return self._waiting.queued(owner)

    def pause_cost(self) -> PauseCost | None:
        """What an embedding pass costs the generations in the engine now; None if there are none."""
        return self._pause_pricing.cost(self._clock.now())

    def set_policies(self, policies: Policies) -> None:
        """Replaces the policies; waiting requests are ranked and decided again."""
        self._policies = policies
        if self._engine_leases is not None and policies.engine_options is not None:
            self._engine_leases.set_options(policies.engine_options)
        for waiting in self._waiting:
            self._waiting.remove(waiting.request.id)
            with self.failing_on_error(ticket := self._tickets[waiting.request.id]):
                self._add_to_queue(ticket)
        self.decide()

    def sync_engine_leases(self) -> None:
        """Updates the leases of an engine that schedules by Tandem's policies."""
        if self._engine_leases is not None:
            self._engine_leases.sync(self._clock.now())

    def tickets(self) -> tuple[Ticket, ...]:
        """All requests that have not ended, in the order of their arrival."""
        return tuple(self._tickets.values())

    def set_largest_request(self, largest: Mapping[Owner, int]) -> None:
        """Sets the most bytes that one request of each owner may ever have; a larger one is rejected."""
        self.snapshots.largest.update(largest)

    def register(self, ticket: Ticket) -> None:
        """Adds a request that has arrived; it must end through `end` or `reject_or_evict`."""
        self._tickets[ticket.request.id] = ticket
        self._idle.clear()

    def enqueue(self, ticket: Ticket) -> None:
        """Puts a registered request into the waiting queue, behind its tenant's share, and runs a cycle."""
        longest = self._policies.admission.options.max_wait
        self._tenants.assign_delay(ticket, self.snapshots.service_time(ticket), longest, self._clock.now())
        self._add_to_queue(ticket)
        if self._engine_leases is not None:
            self._engine_leases.arrived(ticket)
        self.decide()

    def reject_or_evict(self, ticket: Ticket, reject: Reject, basis: Basis | None = None) -> None:
        """Rejects a request, or evicts it if it was dispatched before; `basis` is that of a cycle."""
        is_evicted = ticket.timeline.dispatched is not None
        outcome = Outcome.EVICTED if is_evicted else Outcome.REJECTED
        self._metrics.count_decision(ticket.request.kind, "EVICT" if is_evicted else "REJECT", reject.reason)
        if ticket.outcome is None:
            self.recorder.decided(ticket, Decided(self._clock.now(), reject, basis, self._policies.version))
            self._close(ticket, outcome)
        ticket.reject(reject)

    def reject_waiting(self, reject: Reject) -> None:
        """Rejects the waiting requests; preempted ones may resume."""
        for waiting in self._waiting:
            if (ticket := self._tickets[waiting.request.id]).phase is not Phase.PREEMPTED:
                self.reject_or_evict(ticket, reject)

    def fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """Ends requests as failed; their waits for a grant and their streams raise `error`."""
        for ticket in tickets:
            self._close(ticket, Outcome.FAILED)
            ticket.fail(error)
        self.decide()

    async def until_idle(self) -> None:
        """Waits until every request has ended."""
        await self._idle.wait()

    def evict(self, ticket: Ticket, reject: Reject) -> None:
        """Ends a request, and preempts a generating one so that its stream raises Rejected."""
        self.reject_or_evict(ticket, reject)
        if ticket.request.kind is Kind.GENERATE:
            self._departures.add(self._generators[ticket.request.model].preempt(ticket.request.id))

    def evict_unstarted(self, request_id: str) -> None:
        """Evicts a forwarded request that its engine has not started; does nothing for any other id."""
        self.sync_engine_leases()
        ticket, leases = self._tickets.get(request_id), self._engine_leases
        if ticket is not None and leases is not None and not leases.has_started(ticket):
            waited = self._policies.admission.options.max_wait
            self.evict(ticket, Reject(Reason.QUEUE_TIMEOUT, retry_after(waited)))

    async def wait_for_grant(self, ticket: Ticket) -> None:
        """Returns once the request is admitted. Raises Rejected or DecisionFailed."""
        try:
            # Shielded: a cancelled request stays in the queue until its task runs, and a cycle before that
            # may admit it; `end` then closes its lease like that of any aborted request.
            await asyncio.shield(ticket.granted)
        except asyncio.CancelledError:
            self.end(ticket, Outcome.ABORTED)
            raise

    def _add_to_queue(self, ticket: Ticket) -> None:
        """Ranks a request by the policies in force and inserts it, undecided."""
        self.prefixes.renew(ticket)
        ticket.entry = self.entry_for(ticket)
        self._waiting.add(ticket.entry)

    def entry_for(self, ticket: Ticket) -> Waiting:
        """The queue entry of a request: its rank, work, footprint and decision deadline."""
        request, footprint = ticket.request, ticket.footprint
        pace = self.pace_estimators.of(request.kind.owner).pace_of(request.model)
        options = self._policies.admission.options
        until = None if ticket.phase is Phase.PREEMPTED else wait_bound(request, footprint, pace, options)
        work = float(footprint.steps) if request.kind is Kind.EMBED else footprint.area
        first, arrival, name = self._policies.ordering.rank(request, footprint, pace)
        rank = (first + ticket.tenant_delay, arrival, name)
        return Waiting(request, footprint, until, rank, work)

    def count_tokens(self, ticket: Ticket, steps: int) -> None:
        """Records that the longest sequence of a request grew by `steps` tokens."""
        self.accounting.count_tokens(ticket, self._clock.now(), steps)

    def end(self, ticket: Ticket, outcome: Outcome | None) -> None:
        """Ends a request, and runs a cycle at once if it held memory; later calls do nothing.

        With outcome None it finished.
        """
        if ticket.outcome is not None:
            return
        has_freed = ticket.lease is not None
        self._close(ticket, outcome)
        if has_freed and len(self._waiting):
            self.decide()

    def _close(self, ticket: Ticket, outcome: Outcome | None) -> None:
        """Takes a request out of queue and table and ends it; a cycle follows if it blocked others."""
        # Others may wait for its memory or behind it in the queue. A new request has not blocked any.
        is_obstacle = ticket.lease is not None or ticket.phase in (Phase.DEFERRED, Phase.PREEMPTED)
        self._waiting.remove(ticket.request.id)
        if self._engine_leases is not None and ticket.lease is not None:
            self._engine_leases.record_preemptions()
        del self._tickets[ticket.request.id]
        if not self._tickets:
            self._idle.set()
        self.accounting.end(ticket, self._clock.now(), outcome)
        if is_obstacle and len(self._waiting):
            self._timer.run_soon()

    def decide(self) -> None:
        """Runs one cycle. Raises nothing, since its caller may be an unrelated request."""
        self._timer.cancel()
        now = self._clock.now()
        queues = self._waiting.take_undecided(now)
        undecided = [waiting for queue in queues.values() for waiting in queue.undecided]
        try:
            if self._engine_leases is not None:
                # With the time that dispatches get, since they follow this report.
                self._engine_leases.sync(now)
            view = self.snapshots.pool(queues, now, engine_queue=self._policies.engine_queue)
            plan = run_cycle(view, now, self._policies.admission)
        except Exception as error:
            self._fail_undecided([self._tickets[waiting.request.id] for waiting in undecided], error)
            # A preempted request has no decision deadline that would bring about the next cycle.
            again = after(now, seconds(1)) if len(self._waiting) else None
            self._timer.run_at(self._waiting.next_bound(), again)
        else:
            if undecided:
                self.health.succeeded()
            self._apply(plan, view, now)
            self._timer.run_at(self._waiting.next_bound())

    def _apply(self, plan: Plan, view: PoolView, now: Instant) -> None:
        for request_id, planned in plan.rejections:
            with self.failing_on_error(ticket := self._tickets[request_id]):
                service_time = self.snapshots.service_time(ticket)
                reject = self._retry_spacer.space(planned, ticket.request.kind.owner, service_time, now)
                self.reject_or_evict(ticket, reject, self._basis(ticket, view))
                self.on_not_admitted(ticket.request.kind.owner, reject)
        for request_id, admit in plan.dispatches:
            with self.failing_on_error(ticket := self._tickets[request_id]):
                self._dispatch(ticket, admit, view, now)
        for request_id, defer in plan.deferrals:
            with self.failing_on_error(ticket := self._tickets[request_id]):
                self._record(ticket, defer, view, now)
                self._defer(ticket, defer)

    def _record(self, ticket: Ticket, decision: Admit | Defer, view: PoolView, now: Instant) -> None:
        basis = self._basis(ticket, view)
        self.recorder.decided(ticket, Decided(now, decision, basis, self._policies.version))

    def _basis(self, ticket: Ticket, view: PoolView) -> Basis | None:
        return None if ticket.entry is None else basis_of(ticket.entry, view)

    @contextmanager
    def failing_on_error(self, ticket: Ticket) -> Iterator[None]:
        """Fails the request with DecisionFailed if the block raises, and suppresses the exception."""
        try:
            yield
        except Exception as error:
            self._fail_undecided([ticket], error)

    def _fail_undecided(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """Ends requests that a policy could not decide; their waits for a grant raise DecisionFailed."""
        self.health.failed(error)
        has_preempted = any(ticket.pending_preemptions for ticket in tickets)
        for ticket in tickets:
            if ticket.outcome is None:
                self._close(ticket, Outcome.FAILED)
            if not ticket.granted.done():
                ticket.fail(DecisionFailed(f"{ticket.request.id}: {error!r}"))
        if has_preempted:
            # The memory that was freed may serve requests that the interrupted plan left waiting.
            self._timer.run_soon()

    def _defer(self, ticket: Ticket, defer: Defer) -> None:
        if ticket.phase is Phase.QUEUED:
            ticket.move(Phase.DEFERRED)
            self._metrics.count_decision(ticket.request.kind, "DEFER", defer.reason)
            self.on_not_admitted(ticket.request.kind.owner, defer)

    def _dispatch(self, ticket: Ticket, admit: Admit, view: PoolView, now: Instant) -> None:
        request = ticket.request
        self._waiting.remove(request.id)
        if self.prefixes.renew(ticket) and self._engine_leases is None:
            # Another request freed blocks that this one would have shared: decided again with them.
            self._add_to_queue(ticket)
            self._timer.run_soon()
            return
        self._record(ticket, admit, view, now)
        ticket.is_explored = admit.is_explored
        ticket.pending_preemptions = tuple(
            self._preempt(victim.request_id, request.id) for victim in admit.victims
        )
        footprint = admit.footprint if request.kind is Kind.EMBED else ticket.footprint
        if request.kind is Kind.GENERATE and self._engine_leases is not None:
            # The lease follows the blocks that the engine reports once it starts the request.
            footprint = replace(footprint, base=0, per_step=0)
        ticket.lease = self.ledger.open(
            request.id, request.kind.owner, footprint, priority=request.service_class.priority
        )
        self.prefixes.admit(ticket)
        decision = "ADMIT_WITH_PREEMPTION" if admit.victims else "ADMIT"
        self._metrics.count_decision(request.kind, decision)
        if ticket.timeline.dispatched is None:
            ticket.decision = "DEFER" if ticket.phase is Phase.DEFERRED else decision
            ticket.timeline.dispatched = now
            self.ttft.dispatched(ticket, admit.wait, now)
            self._pause_pricing.admitted(ticket, now)
        ticket.move(Phase.PREFILL)
        ticket.granted.set_result(None)

    def _preempt(self, request_id: str, beneficiary: str | None) -> asyncio.Task[None]:
        """Closes the victim's lease and queues it again; the task ends when its blocks are free."""
        victim = self._tickets[request_id]
        self.recorder.preempted(victim, self.snapshots.preemption(victim, beneficiary, self._clock.now()))
        self.accounting.release(victim)
        victim.move(Phase.PREEMPTED)
        victim.engine_start = None
        victim.preemptions += 1
        victim.renew_grant()
        generator = self._generators[victim.request.model]
        victim.footprint = victim.footprint_to_resume(generator.geometry)
        self._metrics.count_preemption(victim.request.service_class.name)
        with self.failing_on_error(victim):
            self._add_to_queue(victim)
        return self._departures.add(generator.preempt(request_id))
