"""The access log: one line for each HTTP request at its end, with what the gate decided and measured.

A body with several prompts is one line: its times are the longest, its tokens the sum, its outcome the worst.
Connections that end before a request was parsed have no line; `tandem_requests_shed_total` counts those of
overload.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Message, Scope

from controlplane.api.settings import ARRIVAL
from controlplane.core.clock import Duration, to_milliseconds
from controlplane.core.decision import Outcome, Reject
from controlplane.log_output import LogFields
from controlplane.service.decision_history import Decided
from controlplane.service.ticket import TICKETS, Ticket

_log = logging.getLogger("tandem.access")

# From the best; a request without an outcome has not ended.
_BY_SEVERITY = (
    None, Outcome.MET, Outcome.LATE, Outcome.ABORTED, Outcome.REJECTED, Outcome.EVICTED, Outcome.FAILED,
)  # fmt: skip
# Probes and scrapes, which come all the time; logged if they fail.
_FREQUENT = ("/health", "/ready", "/metrics")


class AccessRecord:
    """What is known of one HTTP request; `logged` writes it at the end."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._begin = time.monotonic_ns()
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
    def logged(self) -> Iterator[None]:
        """Collects the tickets of the block, and writes the line when it ends, however that is."""
        token = TICKETS.set(self._tickets)
        try:
            yield
        finally:
            TICKETS.reset(token)
            self._write()

    def _write(self) -> None:
        scope, status = self._scope, self._status
        if scope["path"] in _FREQUENT and status is not None and status < 400:
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
            "duration_ms": round((time.monotonic_ns() - begin) / 1e6, 3),
        }
        _log.info(LogFields("request", fields | (_of_gate(self._tickets) if self._tickets else {})))


def _of_gate(tickets: Sequence[Ticket]) -> dict[str, object]:
    """What the gate knows of the requests of one body; they share class, model and tenant."""
    worst = max(tickets, key=lambda ticket: _BY_SEVERITY.index(ticket.outcome))
    request = worst.request
    decisions = [event for event in worst.history if isinstance(event, Decided)]
    last = decisions[-1] if decisions else None
    measured = [ticket.timeline.measured() for ticket in tickets]
    return {
        "tenant": request.tenant,
        "model": request.model,
        "kind": request.kind.value,
        "class": request.service_class.name,
        "requests": len(tickets),
        "outcome": None if worst.outcome is None else worst.outcome.value,
        "decision": "REJECT" if worst.outcome is Outcome.REJECTED else worst.decision,
        "reason": last.decision.reason.value if last and isinstance(last.decision, Reject) else None,
        "config_version": None if last is None else last.version,
        "prompt_tokens": sum(ticket.request.prompt_tokens for ticket in tickets),
        "cached_tokens": sum(ticket.cached_tokens for ticket in tickets),
        "output_tokens": sum(ticket.timeline.output_tokens for ticket in tickets),
        "preemptions": sum(ticket.preemptions for ticket in tickets),
        "queue_ms": _longest(ticket.timeline.queue for ticket in tickets),
        "predicted_ttft_ms": _longest(ticket.predicted_ttft for ticket in tickets),
        **{f"{name}_ms": _longest(each[name] for each in measured) for name in ("ttft", "tpot", "e2e")},
    }


def _longest(times: Iterator[Duration | None]) -> float | None:
    found = [to_milliseconds(time) for time in times if time is not None]
    return round(max(found), 3) if found else None
