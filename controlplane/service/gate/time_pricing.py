"""Learns from each generation that ends what a second of the device is worth (`TimePrice`)."""

from controlplane.core.clock import Instant, after, to_seconds
from controlplane.core.decision import Outcome
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.request import Kind, Owner
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.policy.gate.time_price import TimePrice
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ObservedPace, ReportedPace

# With less of the LLM's memory in use, a generation that missed its SLO did not wait for memory.
_MOST_MEMORY_IN_USE = 0.5
# An engine that waits on purpose for more of its time has time left.
_MOST_WAITED = 0.05


class TimePricing:
    """Tells the price of generations that ended, and which of them lacked time.

    One lacked time if it missed its SLO although it could have met it when it arrived, and memory was always
    free. Only objectives that the operator states count: with a TPOT that no device meets, a client could
    have the embeddings of others rejected, and what an answer has left after its retrieval says nothing about
    the device. Nor does a request that failed or that never fits.

    While the engine waits for embedding passes on purpose, time is not short: what is missed then is missed
    by the wait, or by chance (decision 0099).
    """

    def __init__(self, ledger: MemoryLedger, estimator: ObservedPace | ReportedPace) -> None:
        self._ledger = ledger
        self._estimator = estimator
        self._price = TimePrice()
        self._memory_short_at: Instant | None = None

    def per_second(self, now: Instant) -> float:
        """Weighted SLOs that generations lose for each second of the device."""
        self._look_at_memory(now)
        return 0.0 if self._estimator.waited_share > _MOST_WAITED else self._price.per_second(now)

    def _look_at_memory(self, now: Instant) -> None:
        if self._ledger.held(Owner.LLM) > _MOST_MEMORY_IN_USE * self._ledger.ceiling(Owner.LLM):
            self._memory_short_at = now

    def request_ended(self, ticket: Ticket) -> None:
        """Counts a generation with the objectives of its class that was served, rejected or evicted."""
        request, at = ticket.request, ticket.timeline.finished
        if at is None or request.kind is not Kind.GENERATE or request.slo != request.service_class.slo:
            return
        never_fits = ticket.footprint.worst > self._ledger.ceiling(Owner.LLM)
        if never_fits or ticket.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return
        pace, deadline = self._estimator.pace_of(request.model), request.first_deadline
        if pace is None or deadline is None:
            return
        # The requests that decode in one step share its time. `own_step` leaves out that of embedding passes.
        running = max(1, self._ledger.count(Owner.LLM))
        step = to_seconds(self._estimator.own_step or pace.step) / running
        steps = max(ticket.footprint.steps, ticket.timeline.output_tokens)
        could = after(request.arrival, work_before_deadline(request, ticket.footprint, pace)) <= deadline
        self._look_at_memory(at)
        has_memory = self._memory_short_at is None or self._memory_short_at < request.arrival
        self._price.record(
            at,
            weight=request.service_class.weight,
            needed=to_seconds(pace.per_prompt_token) * request.prefill_tokens + step * steps,
            lacked_time=ticket.outcome is not Outcome.MET and could and has_memory,
        )
