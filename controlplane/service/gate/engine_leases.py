"""What does an engine that orders by itself hold for each request, and who waits in it?

Its requests have leases from the moment they are forwarded, but such a lease stands at what the engine
really holds: nothing before it starts and after it preempts.
"""

from collections.abc import Callable, Mapping

from controlplane.core.errors import BackendDown
from controlplane.core.memory import MemoryLedger
from controlplane.core.ports import EngineState, Generator
from controlplane.core.request import Kind
from controlplane.core.view import Waiting
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import ReportedPace

Precedence = Callable[[Waiting, Waiting], bool]


class EngineLeases:
    """`tickets` is the dispatcher's own table, `precedes` the engine's order of two that wait in it."""

    def __init__(
        self,
        generators: Mapping[str, Generator],
        ledger: MemoryLedger,
        tickets: Mapping[str, Ticket],
        goes_before: Precedence,
    ) -> None:
        self._generators = generators
        self._ledger = ledger
        self._tickets = tickets
        self._held: dict[str, int] = {}
        self._last: EngineState | None = None
        self.precedes = goes_before
        self.pace = ReportedPace(next((one.step_cost for one in generators.values()), None))

    def sync(self) -> None:
        """Brings the leases up to what the engine's last step says."""
        for generator in self._generators.values():
            try:
                state = generator.state()
            except BackendDown:
                # Its requests are about to fail, which closes their leases.
                continue
            if state is not self._last:
                self._apply(state)

    def _apply(self, state: EngineState) -> None:
        self._last = state
        self.pace.pace = state.pace or self.pace.pace
        held = dict(state.held_bytes or {})
        for name in held.keys() | self._held.keys():
            size, ticket = held.get(name, 0), self._tickets.get(name)
            if ticket is None or ticket.lease is None or size == self._held.get(name, 0):
                continue
            per_step = ticket.footprint.per_step if size else 0
            self._ledger.follow(ticket.lease, held=size, per_step=per_step)
        self._held = held

    def work_ahead(self, waiting: Waiting) -> float:
        """Of those inside that have not started, or were preempted, and go before this one."""
        return sum(
            place.work
            for ticket in self._tickets.values()
            if (place := ticket.entry) is not None
            and ticket.lease is not None
            and place.request.kind is Kind.GENERATE
            and place.request.id not in self._held
            and self.precedes(place, waiting)
        )
