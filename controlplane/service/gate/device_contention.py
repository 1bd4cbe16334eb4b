"""Collects the decode deadlines of running requests for `decode_slack`, and signals device contention.

The slack is that of `decode_slack` over all running generation requests. Those of lower priority than every
admitted embedding request are ignored.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from controlplane.core.clock import Duration, Instant, after, between
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.pool_view import Pace
from controlplane.core.ports import Generator, PassLimit
from controlplane.core.request import Kind
from controlplane.policy.sharing.decode_slack import Decoding, TokenDeadline, decode_slack
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ObservedPace, ReportedPace


def embedding_time_slack(
    tickets: Collection[Ticket], ledger: MemoryLedger, paces: ObservedPace | ReportedPace, now: Instant
) -> PassLimit | None:
    """Longest time that an embedding batch may occupy the device now; None if unlimited.

    `paces` are those of the LLM.
    """
    pace = paces.pace
    embedding_priority = max(
        (
            _priority(ticket)
            for ticket in tickets
            if ticket.lease is not None and ticket.request.kind is Kind.EMBED
        ),
        default=0,
    )
    running = [
        _decoding(ticket, ledger.lease_state(ticket.lease)[1], pace, now)
        for ticket in tickets
        if ticket.lease is not None
        and ticket.request.kind is Kind.GENERATE
        and _priority(ticket) >= embedding_priority
    ]
    mean_step = Duration(0) if pace is None else pace.step
    # `own_step` excludes the delay by embedding batches, which must not reduce the slack that they get.
    return decode_slack(running, mean_step if paces.own_step is None else paces.own_step, paces.lost_share)


def _priority(ticket: Ticket) -> int:
    return ticket.request.service_class.priority


def _decoding(ticket: Ticket, remaining: int, pace: Pace | None, now: Instant) -> Decoding:
    fewest = max(1, min(remaining, ticket.likely_total[0] - ticket.timeline.output_tokens))
    return Decoding(
        _token_deadlines(ticket, remaining, remaining, pace, now),
        _token_deadlines(ticket, fewest, remaining, pace, now),
        ticket.request.slo.tpot,
    )


def _token_deadlines(
    ticket: Ticket, to_last: int, remaining: int, pace: Pace | None, now: Instant
) -> tuple[TokenDeadline, ...]:
    """The deadlines that the objectives set.

    `remaining` is the predicted number of tokens. The mean time per token counts over the next `to_last`
    tokens.
    """
    slo, timeline, first = ticket.request.slo, ticket.timeline, 0
    found = []
    if timeline.first_token is None or timeline.last_token is None:
        first = _steps_to_first_token(ticket, pace, now)
        if slo.ttft is not None:
            found.append(TokenDeadline(between(now, after(timeline.arrival, slo.ttft)), first))
    else:
        if slo.tpot is not None:
            allowed = Duration(slo.tpot * (timeline.output_tokens + to_last - 1))
            found.append(TokenDeadline(between(now, after(timeline.first_token, allowed)), to_last))
        if slo.gap is not None:
            found.append(TokenDeadline(between(now, after(timeline.last_token, slo.gap)), 1))
    if slo.e2e is not None:
        found.append(TokenDeadline(between(now, after(timeline.arrival, slo.e2e)), first + remaining))
    return tuple(found)


def _steps_to_first_token(ticket: Ticket, pace: Pace | None, now: Instant) -> int:
    """The steps left of the TTFT forecast that was made at dispatch; 1 if it has passed or there is none."""
    start = ticket.engine_start
    if start is None or pace is None or pace.step <= 0:
        return 1
    return max(1, (start.forecast.median - between(start.at, now)) // pace.step)


class DeviceContention:
    """Tells the LLM engines whether embedding work is pending on the device that they share."""

    def __init__(self, generators: Collection[Generator]) -> None:
        self._generators = generators
        self._pending = 0

    @contextmanager
    def embedding_pending(self) -> Iterator[None]:
        """Marks one embedding request as pending while the block runs."""
        self._pending += 1
        if self._pending == 1:
            self._notify(is_shared=True)
        try:
            yield
        finally:
            self._pending -= 1
            if self._pending == 0:
                self._notify(is_shared=False)

    def engine_restarted(self) -> None:
        """Tells a new engine."""
        self._notify(is_shared=self._pending > 0)

    def _notify(self, *, is_shared: bool) -> None:
        for generator in self._generators:
            generator.set_device_contention(is_shared=is_shared)
