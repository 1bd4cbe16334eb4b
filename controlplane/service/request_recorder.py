"""Records what happens to each request: for its explanation, and as events of the live feed.

An event holds numbers only, never the state that a decision was taken on, so its ring is small. The state
stays in the ticket, which the last requests that ended keep for `GET /admin/explain/ID`.
"""

from collections import deque
from dataclasses import dataclass

from controlplane.core.clock import Clock, Duration, Instant, to_milliseconds
from controlplane.core.decision import Admit, Defer, Outcome, Reject
from controlplane.core.request import Kind
from controlplane.service.attainment_windows import AttainmentWindows
from controlplane.service.decision_history import Decided, Preempted
from controlplane.service.live_records import LiveRecords
from controlplane.service.ticket import Ticket


@dataclass(slots=True)
class FirstTokens:
    """First tokens with a forecast since the last sample: their number, and sums in milliseconds.

    For embeddings the response is the first token.
    """

    count: int = 0
    predicted_ms: float = 0.0
    actual_ms: float = 0.0


class RequestRecorder:
    """Appends decisions, preemptions and ends to the tickets and to the records of the live feed.

    `kept` holds the last `remembered` requests that ended.
    """

    def __init__(self, clock: Clock, *, remembered: int) -> None:
        self.records = LiveRecords(clock)
        self.kept: deque[Ticket] = deque(maxlen=remembered)
        self.attainment = AttainmentWindows()
        self._first_tokens: dict[str, FirstTokens] = {}

    def remember(self, requests: int) -> None:
        """Keeps the last `requests` that ended from now on."""
        if requests != self.kept.maxlen:
            self.kept = deque(self.kept, maxlen=requests)

    def decided(self, ticket: Ticket, event: Decided) -> None:
        """Records a decision of the gate."""
        ticket.history.append(event)
        fields = {**_named(ticket), "wait_ms": _milliseconds(event.decision.wait)}
        match event.decision:
            case Admit(victims=victims):
                self.records.add("admission", event.at, fields | {"victims": len(victims)})
            case Defer(reason=reason):
                self.records.add("deferral", event.at, fields | {"reason": reason.value})
            case Reject(reason=reason, retry_after=retry):
                fields |= {"reason": reason.value, "retry_after_ms": _milliseconds(retry)}
                self.records.add("rejection", event.at, fields)

    def preempted(self, ticket: Ticket, event: Preempted) -> None:
        """Records a preemption and its cost."""
        ticket.history.append(event)
        self.records.add(
            "preemption",
            event.at,
            {
                **_named(ticket),
                "by": event.by,
                "for": event.beneficiary,
                "for_class": event.beneficiary_class,
                "freed_bytes": event.freed_bytes,
                "recompute_tokens": event.recompute_tokens,
                "recompute_ms": _milliseconds(event.recompute),
            },
        )

    def first_token(self, ticket: Ticket, took: Duration) -> None:
        """Compares the TTFT of a request with its forecast."""
        if ticket.predicted_ttft is None:
            return
        found = self._first_tokens.setdefault(ticket.request.service_class.name, FirstTokens())
        found.count += 1
        found.predicted_ms += to_milliseconds(ticket.predicted_ttft)
        found.actual_ms += to_milliseconds(took)

    def ended(self, ticket: Ticket, now: Instant, outcome: Outcome) -> None:
        """Records the end of a request."""
        self.kept.append(ticket)
        request = ticket.request
        measured = ticket.timeline.measured(request.kind)
        self.attainment.count(request.service_class.name, outcome, now)
        has_finished = outcome in (Outcome.MET, Outcome.LATE)
        if request.kind is Kind.EMBED and has_finished:
            self.first_token(ticket, measured["ttft"] or Duration(0))
        objectives = ticket.timeline.objectives_met(request.slo)
        self.records.add(
            "end",
            now,
            {
                **_named(ticket),
                "outcome": outcome.value,
                "missed": [name for name, met in objectives.items() if has_finished and not met],
                "predicted_ttft_ms": _milliseconds(ticket.predicted_ttft),
                **{f"{name}_ms": _milliseconds(took) for name, took in measured.items() if has_finished},
                "tokens": ticket.timeline.output_tokens,
            },
        )

    def take_first_tokens(self) -> dict[str, FirstTokens]:
        """The first tokens by class since the last call."""
        taken, self._first_tokens = self._first_tokens, {}
        return taken


def _named(ticket: Ticket) -> dict[str, object]:
    request = ticket.request
    return {"id": request.id, "class": request.service_class.name, "kind": request.kind.value}


def _milliseconds(duration: Duration | None) -> float | None:
    return None if duration is None else round(to_milliseconds(duration), 1)
