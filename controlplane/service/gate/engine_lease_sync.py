"""Updates leases to the blocks that an engine with Tandem's scheduler reports for running requests.

Such an engine starts and preempts the forwarded requests itself. Each of them has a lease from the moment it
is forwarded, but the lease holds what the engine holds: nothing before the start and after a preemption.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from controlplane.core.clock import Instant, scaled
from controlplane.core.engine_reports import EngineState
from controlplane.core.errors import BackendDown
from controlplane.core.memory_ledger import LeaseTable, MemoryLedger
from controlplane.core.pool_view import Waiting
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Owner
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import engine_precedence
from controlplane.service.decision_history import Preempted
from controlplane.service.request_recorder import RequestRecorder
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ReportedPace


class EngineLeases:
    """Copies the blocks that the engine reports into the ledger.

    `tickets` is the dispatcher's table, and `options` are those of the engine's policy. `precedence` is the
    order in which the engine starts requests.
    """

    def __init__(
        self,
        generator: Generator,
        ledger: MemoryLedger,
        tickets: Mapping[str, Ticket],
        options: EngineOptions,
        recorder: RequestRecorder,
    ) -> None:
        self._generator = generator
        self._ledger = ledger
        self._tickets = tickets
        self._recorder = recorder
        self._held: dict[str, int] = {}
        self._recorded_until: Instant | None = None
        self._last: EngineState | None = None
        self._last_at: Instant | None = None
        self.planned: Instant | None = None
        """Time of the report before the last one of steps: the engine has planned a step with all requests
        forwarded before it. The last report may have been on its way when later ones were forwarded."""
        self._options = options
        self.precedence = engine_precedence(options)
        self.pace_estimator = ReportedPace(generator.step_cost)

    def set_options(self, options: EngineOptions) -> None:
        """Follows a change of the engine's options; equal ones keep what the size cutoff has learned."""
        if options != self._options:
            self._options, self.precedence = options, engine_precedence(options)

    def sync(self, now: Instant) -> None:
        """Sets each lease to the bytes that its request held after the engine's last step."""
        if (state := self._state()) is not None and state is not self._last:
            self._record_preemptions(state)
            self._apply(state, now)

    def record_preemptions(self) -> None:
        """Records what the engine has preempted since the last report, and changes no lease."""
        if (state := self._state()) is not None:
            self._record_preemptions(state)

    def _state(self) -> EngineState | None:
        """The engine's last report; None for a dead one, whose requests fail, which closes their leases."""
        try:
            return self._generator.state()
        except BackendDown:
            return None

    def _record_preemptions(self, state: EngineState) -> None:
        recorded = self._recorded_until
        if not state.preempted or (recorded is not None and state.preempted[-1].at <= recorded):
            return
        pace = state.pace or self.pace_estimator.pace
        for lost in state.preempted:
            ticket, gainer = self._tickets.get(lost.request_id), self._tickets.get(lost.beneficiary or "")
            if ticket is None or (recorded is not None and lost.at <= recorded):
                continue
            took = None if pace is None else scaled(pace.per_prompt_token, lost.tokens)
            name = None if gainer is None else gainer.request.service_class.name
            event = Preempted(lost.at, "engine", lost.beneficiary, lost.tokens, took, beneficiary_class=name)
            self._recorder.preempted(ticket, event)
        self._recorded_until = state.preempted[-1].at

    def _apply(self, state: EngineState, now: Instant) -> None:
        self._last = state
        if state.running or state.waiting:
            # Without a request the engine plans no step, and each of its reports is a new object.
            self.planned, self._last_at = self._last_at, now
        self.pace_estimator.pace = pace = state.pace or self.pace_estimator.pace
        held = dict(state.held_bytes or {})
        for name in held.keys() | self._held.keys():
            size, ticket = held.get(name, 0), self._tickets.get(name)
            if ticket is None or ticket.lease is None or size == self._held.get(name, 0):
                continue
            if size:
                ticket.has_lost_blocks = False
            elif self._ledger.lease_state(ticket.lease)[0]:
                # A lease that had no blocks is of a request that the gate preempted and has forwarded again.
                ticket.has_lost_blocks = True
            per_step = ticket.footprint.per_step if size else 0
            self._ledger.set_reported(ticket.lease, held=size, per_step=per_step)
        self._held = held
        if (cutoff := self.precedence.cutoff) is not None and pace is not None:
            cutoff.stepped(now, *self._memory(), pace.step)

    def has_started(self, ticket: Ticket) -> bool:
        """Whether a forwarded request holds blocks or has held some; also if it is not forwarded."""
        is_first = not ticket.preemptions and ticket.timeline.first_token is None
        return (
            ticket.lease is None or ticket.request.id in self._held or not is_first or ticket.has_lost_blocks
        )

    def _memory(self) -> tuple[int, int]:
        return self._ledger.ceiling(Owner.LLM), self._ledger.held(Owner.LLM)

    def arrived(self, ticket: Ticket) -> None:
        """Records a new request, which the gate may still reject."""
        cutoff, entry = self.precedence.cutoff, ticket.entry
        if cutoff is not None and entry is not None and entry.request.kind is Kind.GENERATE:
            cutoff.arrived(entry)

    def weights(self, leases: LeaseTable) -> list[float]:
        """Weights of the classes of the requests that hold `leases`."""
        return [self._tickets[name].request.service_class.weight for name in leases.ids]

    def queued(self) -> list[Waiting]:
        """The forwarded requests that hold no blocks, which the engine has not started."""
        generate = Kind.GENERATE
        return [
            entry
            for ticket in self._tickets.values()
            if (entry := ticket.entry) is not None
            and ticket.lease is not None
            and entry.request.kind is generate
            and entry.request.id not in self._held
        ]

    def work_ahead(self, waiting: Waiting, queued: Sequence[Waiting]) -> float:
        """The work of those of the `queued` requests that the engine starts before `waiting`.

        For a request above the engine's size cutoff, the work that goes before it while the load lasts.
        """
        ahead = sum([entry.work for entry in self.precedence.before(waiting, queued)])
        if (cutoff := self.precedence.cutoff) is not None and (pace := self.pace_estimator.pace) is not None:
            ahead += cutoff.work_ahead(waiting, queued, *self._memory(), pace.step)
        return ahead


class EngineQueueView:
    """What one snapshot states of an engine that schedules by itself; its lists are made once, on demand."""

    def __init__(self, engine: EngineLeases, leases: LeaseTable) -> None:
        self._engine, self._leases = engine, leases

    @cached_property
    def _queued(self) -> list[Waiting]:
        return self._engine.queued()

    @cached_property
    def _weights(self) -> list[float]:
        return self._engine.weights(self._leases)

    def work_ahead(self, waiting: Waiting) -> float:
        """The work of the forwarded requests that the engine starts before this one."""
        return self._engine.work_ahead(waiting, self._queued)

    def keeps(self, waiting: Waiting) -> LeaseTable:
        """The leases that the engine would not preempt for this request."""
        return self._engine.precedence.kept(self._leases, self._weights, waiting)
