"""Updates leases to the blocks that an engine with Tandem's scheduler reports for running requests.

Such an engine starts and preempts the forwarded requests itself. Each of them has a lease from the moment it
is forwarded, but the lease holds what the engine holds: nothing before the start and after a preemption.
"""

from collections.abc import Callable, Mapping

from controlplane.core.errors import BackendDown
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.pool_view import Waiting
from controlplane.core.ports import EngineState, Generator
from controlplane.core.request import Kind
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ReportedPace

Precedence = Callable[[Waiting, Waiting], bool]


class EngineLeases:
    """Copies the blocks that the engine reports into the ledger.

    `tickets` is the dispatcher's table. `precedes(a, b)` is true if the engine starts `a` before `b`.
    """

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
        self.pace = ReportedPace(next((generator.step_cost for generator in generators.values()), None))

    def sync(self) -> None:
        """Sets each lease to the bytes that its request held after the engine's last step."""
        for generator in self._generators.values():
            try:
                state = generator.state()
            except BackendDown:
                # The requests of a dead engine fail, which closes their leases.
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
            self._ledger.set_reported(ticket.lease, held=size, per_step=per_step)
        self._held = held

    def work_ahead(self, waiting: Waiting) -> float:
        """The work of forwarded requests that hold no blocks and that the engine starts before `waiting`."""
        return sum(
            entry.work
            for ticket in self._tickets.values()
            if (entry := ticket.entry) is not None
            and ticket.lease is not None
            and entry.request.kind is Kind.GENERATE
            and entry.request.id not in self._held
            and self.precedes(entry, waiting)
        )
