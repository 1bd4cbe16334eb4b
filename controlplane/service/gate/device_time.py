"""How long may embeddings keep the device now? Asks `decode_slack` what every answer has still to keep, but
those of lower priority than the embeddings that are let in: who matters less holds nobody up.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from controlplane.core.clock import Duration, Instant, after, between
from controlplane.core.memory import MemoryLedger
from controlplane.core.ports import Generator
from controlplane.core.request import Kind
from controlplane.core.view import Pace
from controlplane.policy.sharing.decode_slack import Decoding, TokenDeadline, decode_slack
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import ObservedPace, ReportedPace


def embedding_time_slack(
    tickets: Collection[Ticket], ledger: MemoryLedger, paces: ObservedPace | ReportedPace, now: Instant
) -> Duration | None:
    pace = paces.pace
    embedding = max(
        (_priority(one) for one in tickets if one.lease is not None and one.request.kind is Kind.EMBED),
        default=0,
    )
    running = [
        Decoding(
            _token_deadlines(ticket, ledger.lease_state(ticket.lease)[1], pace, now), ticket.request.slo.tpot
        )
        for ticket in tickets
        if ticket.lease is not None
        and ticket.request.kind is Kind.GENERATE
        and _priority(ticket) >= embedding
    ]
    usual = Duration(0) if pace is None else pace.step
    # What an embedding batch adds to a step is not to be taken off what it may add.
    return decode_slack(running, usual if paces.own_step is None else paces.own_step)


def _priority(ticket: Ticket) -> int:
    return ticket.request.service_class.priority


def _token_deadlines(
    ticket: Ticket, to_go: int, pace: Pace | None, now: Instant
) -> tuple[TokenDeadline, ...]:
    """`to_go` is the predicted number of tokens still to come."""
    slo, seen = ticket.request.slo, ticket.timeline
    slack, first = ticket.slack(now), 0
    found = []
    if seen.first_token is None:
        first = _steps_to_first_token(ticket, pace, now)
        if slo.ttft is not None:
            found.append(TokenDeadline(between(now, after(seen.arrival, slo.ttft)), first))
    elif slo.tpot is not None and slack is not None:
        found.append(TokenDeadline(Duration(slack + slo.tpot * (to_go - 1)), to_go))
    if slo.e2e is not None:
        found.append(TokenDeadline(between(now, after(seen.arrival, slo.e2e)), first + to_go))
    return tuple(found)


def _steps_to_first_token(ticket: Ticket, pace: Pace | None, now: Instant) -> int:
    """What is left of what was said when it was sent to the engine; one when that is over, or nothing was."""
    starting = ticket.engine_start
    if starting is None or pace is None or pace.step <= 0:
        return 1
    return max(1, (starting.said.median - between(starting.at, now)) // pace.step)


# FOLDED shared_device.py:
# Does embedding work want the device that answers are computed on? Engines are told when that changes.


class DeviceContention:
    def __init__(self, generators: Collection[Generator]) -> None:
        self._generators = generators
        self._pending = 0

    @contextmanager
    def embedding_pending(self) -> Iterator[None]:
        """By one request, for as long as the block lasts."""
        self._pending += 1
        if self._pending == 1:
            self._notify(is_shared=True)
        try:
            yield
        finally:
            self._pending -= 1
            if self._pending == 0:
                self._notify(is_shared=False)

    def _notify(self, *, is_shared: bool) -> None:
        for generator in self._generators:
            generator.set_device_contention(is_shared=is_shared)
