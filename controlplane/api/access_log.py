"""The access log: one line for each HTTP request at its end, with what the gate decided and measured.

A body with several prompts is one line: its times are the longest, its tokens the sum, its outcome the worst.
Requests that overload sheds before they are parsed share one line a second, with their number by kind.
Connections that end before a request was parsed have none.
"""

import asyncio
import logging
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Message, Scope

from controlplane.api.settings import ARRIVAL
from controlplane.core.clock import Duration, to_milliseconds
from controlplane.core.decision import Outcome, Reject
from controlplane.core.request import Kind
from controlplane.log_output import LogFields
from controlplane.service.decision_history import Decided
from controlplane.service.ticket import TICKETS, Ticket

EXPECTED_FAILURE = "expected_failure"
"""Key in the state of an ASGI scope: a probe fails as it should, as during the start."""
_log = logging.getLogger("tandem.access")

# From the best; a request without an outcome has not ended.
_BY_SEVERITY = (
    None, Outcome.MET, Outcome.LATE, Outcome.ABORTED, Outcome.REJECTED, Outcome.EVICTED, Outcome.FAILED,
)  # fmt: skip
_REFUSALS = {Outcome.REJECTED: "REJECT", Outcome.EVICTED: "EVICT"}
_DELAY_SECONDS = 0.5
_SHED_SECONDS = 1.0
# About a millisecond of work.
_MOST_LINES = 50
# Probes, scrapes, and readings of open pages and of routers, which come all the time; logged if they fail.
_FREQUENT = ("/health", "/ready", "/metrics", "/admin/live", "/admin/load")


class AccessLog:
    """Writes the lines of requests that have ended, several at once.

    A line alone takes three times as long, since a request leaves nothing of the code that writes it in the
    processor's caches. Each line has the time at which its request ended.
    """

    def __init__(self) -> None:
        self._ended: list[AccessRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        # Also writes what is left when the process exits.
        self._finalizer = weakref.finalize(self, _write_all, self._ended)

    def add(self, record: "AccessRecord") -> None:
        """Takes the record of a request that has ended; its line is written within half a second."""
        self._ended.append(record)
        if len(self._ended) >= _MOST_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_SECONDS, self.flush)

    def flush(self) -> None:
        """Writes the lines of all requests that have ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _write_all(self._ended)


class AccessRecord:
    """What is known of one HTTP request; `logged` hands it to the log at the end."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._begin = time.monotonic_ns()
        self._end = 0
        self._ended_at = 0.0
        self._status: int | None = None
        self._bytes = 0
        self._tickets: list[Ticket] = []

    def sent(self, message: Message) -> None:
        """Takes status and size from a message of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            self._bytes += len(message.get("body", b""))

    @contextmanager
    def logged(self, log: AccessLog) -> Iterator[None]:
        """Collects the tickets of the block, and has the line written when it ends, however that is."""
        token = TICKETS.set(self._tickets)
        try:
            yield
        finally:
            TICKETS.reset(token)
            self._end, self._ended_at = time.monotonic_ns(), time.time()
            log.add(self)

    def write(self) -> None:
        """Writes the line."""
        scope, status = self._scope, self._status
        has_failed = status is None or status >= 400
        if scope["path"] in _FREQUENT and (not has_failed or EXPECTED_FAILURE in scope["state"]):
            return
        begin = scope["state"].get(ARRIVAL) or self._begin
        client = scope.get("client")
        fields: dict[str, object] = {
            "request_id": scope["state"]["request_id"],
            "client": None if client is None else client[0],
            "method": scope["method"],
            "path": scope["path"],
            # None: the client left before the response began.
            "status": status,
            "bytes": self._bytes,
            "duration_ms": round((self._end - begin) / 1e6, 3),
        }
        if self._tickets:
            fields |= gate_fields(self._tickets)
        write_line(LogFields("request", fields), self._ended_at)


class ShedLines:
    """One line a second of the requests that were shed before they were parsed, while there are any.

    A line for each would cost time that the event loop lacks.
    """

    def __init__(self) -> None:
        self._counts: Counter[Kind] = Counter()

    def add(self, kind: Kind) -> None:
        """Counts a request; its line is written within a second."""
        if not self._counts:
            asyncio.get_running_loop().call_later(_SHED_SECONDS, self.flush)
        self._counts[kind] += 1

    def flush(self) -> None:
        """Writes the line of the requests since the last one."""
        fields = {kind.value: self._counts[kind] for kind in Kind}
        self._counts.clear()
        write_line(LogFields("shed before parsing", {"reason": "overloaded", **fields}), time.time())


def _write_all(ended: list[AccessRecord]) -> None:
    records = ended[:]
    ended.clear()
    for record in records:
        record.write()


def write_line(fields: LogFields, at: float) -> None:
    """Logs a line of the Unix time `at`, without the search for the calling line, which no format shows."""
    if _log.isEnabledFor(logging.INFO):
        line = _log.makeRecord(_log.name, logging.INFO, __file__, 0, fields, (), None)
        line.created, line.msecs = at, at % 1 * 1_000
        _log.handle(line)


def gate_fields(tickets: Sequence[Ticket]) -> dict[str, object]:
    """What the gate knows of the requests of one body; they share class, model and tenant."""
    worst = tickets[0]
    if len(tickets) > 1:
        worst = max(tickets, key=lambda ticket: _BY_SEVERITY.index(ticket.outcome))
    request = worst.request
    last = next((event for event in reversed(worst.history) if isinstance(event, Decided)), None)
    measured = [ticket.timeline.measured(request.kind) for ticket in tickets]
    return {
        "tenant": request.tenant,
        "model": request.name_of_model,
        "kind": request.kind.value,
        "class": request.service_class.name,
        "requests": len(tickets),
        "outcome": None if worst.outcome is None else worst.outcome.value,
        "decision": worst.decision if worst.outcome is None else _REFUSALS.get(worst.outcome, worst.decision),
        "reason": last.decision.reason.value if last and isinstance(last.decision, Reject) else None,
        "config_version": None if last is None else last.version,
        "prompt_tokens": sum([ticket.request.prompt_tokens for ticket in tickets]),
        "cached_tokens": sum([ticket.cache_hit_tokens for ticket in tickets]),
        "output_tokens": sum([ticket.timeline.output_tokens for ticket in tickets]),
        "preemptions": sum([ticket.preemptions for ticket in tickets]),
        "queue_ms": _longest([ticket.timeline.queue for ticket in tickets]),
        "predicted_ttft_ms": _longest([ticket.predicted_ttft for ticket in tickets]),
        "ttft_ms": _longest([each["ttft"] for each in measured]),
        "tpot_ms": _longest([each["tpot"] for each in measured]),
        "e2e_ms": _longest([each["e2e"] for each in measured]),
    }


def _longest(times: Sequence[Duration | None]) -> float | None:
    found = [time for time in times if time is not None]
    return round(to_milliseconds(max(found)), 3) if found else None
