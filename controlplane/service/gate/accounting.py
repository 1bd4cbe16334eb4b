"""How did it end, and what does that teach? Closes the lease, counts the outcome, teaches the predictors."""

from collections.abc import Mapping

from controlplane.core.clock import Duration, Instant, between
from controlplane.core.decision import Outcome
from controlplane.core.forecast import LengthForecast
from controlplane.core.memory import MemoryLedger
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Owner, Phase
from controlplane.metrics import Metrics
from controlplane.service.gate.backpressure import RateLimiter
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.prediction.fail_open import GuardedLengthPredictor, Subject
from controlplane.service.prediction.ttft import TtftPredictor
from controlplane.service.ticket import Ticket
from predictors.timing.step_time import ObservedPace, ReportedPace

# A forecast is worth telling the engine when it moves what remains by so much of it.
_MATERIAL_CHANGE = 0.25
# Before, little can have been learned since it was forecast.
_REFORECAST_FROM_TOKENS = 32


class Accounting:
    """Every path out of the gate ends in `end`, exactly once."""

    def __init__(
        self,
        ledger: MemoryLedger,
        metrics: Metrics,
        rates: RateLimiter,
        tenants: TenantQueues,
        lengths: GuardedLengthPredictor,
        paces: Mapping[Owner, ObservedPace | ReportedPace],
        first_tokens: TtftPredictor,
        generators: Mapping[str, Generator],
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._rates = rates
        self._tenants = tenants
        self._lengths = lengths
        self._paces = paces
        self._ttft = first_tokens
        self._generators = generators
        self._rate_guard = lengths.fail_open[Subject.PACE]
        self._length_guard = lengths.fail_open[Subject.REMAINING_LENGTH]

    def release(self, ticket: Ticket) -> None:
        """Gives the memory back without ending the request."""
        if ticket.lease is not None:
            self._ledger.close(ticket.lease)
            ticket.lease = None

    def count_tokens(self, ticket: Ticket, now: Instant, steps: int) -> None:
        """`steps` tokens came out at once: stamp them and let the lease grow."""
        seen = ticket.timeline
        with self._rate_guard:
            self._observe_rate(ticket, now, steps)
        if ticket.phase is Phase.PREFILL:
            ticket.move(Phase.DECODE)
        seen.stamp_tokens(now, steps)
        if ticket.lease is not None:
            left = self._ledger.grow(ticket.lease, steps)
            done = seen.output_tokens
            # Often while little is known, then rarely; at once when the answer outruns its forecast.
            if left == 1 or not done & (done - 1):
                with self._length_guard:
                    self._reforecast(ticket)

    def _observe_rate(self, ticket: Ticket, now: Instant, steps: int) -> None:
        seen = ticket.timeline
        if ticket.phase is Phase.DECODE and seen.last_token is not None:
            self._paces[Owner.LLM].observe_step(Duration(between(seen.last_token, now) // steps))
        elif ticket.phase is Phase.PREFILL:
            self._ttft.first_token(ticket, now)
            if seen.first_token is None and seen.dispatched is not None:
                self._metrics.read(ticket.request, ticket.cached_tokens)
                took = between(seen.dispatched, now)
                self._paces[Owner.LLM].observe_prefill(ticket.request.prompt_tokens, took)

    def end(self, ticket: Ticket, now: Instant, outcome: Outcome | None) -> None:
        """`None` for a request that finished: its own stamps say whether in time."""
        request, seen = ticket.request, ticket.timeline
        if seen.dispatched is None:
            self._tenants.refund(ticket)
        self._rates.charge(request.tenant, now, seen.output_tokens)
        self.release(ticket)
        ticket.move(Phase.FINISHED)
        seen.finished = now
        if outcome is None:
            outcome = Outcome.MET if all(seen.kept(request.slo).values()) else Outcome.LATE
        ticket.outcome = outcome
        self._metrics.ended(request, seen, outcome)
        if request.kind is not Kind.GENERATE:
            return
        if outcome in (Outcome.MET, Outcome.LATE):
            self._lengths.observe(request, seen.output_tokens)
        else:
            self._lengths.withdraw(request)

    def _reforecast(self, ticket: Ticket) -> None:
        """Forecast what remains again."""
        if ticket.forecast is None or ticket.lease is None:
            return
        done = ticket.timeline.output_tokens
        ticket.forecast = self._updated_forecast(ticket, ticket.forecast, done)
        left = ticket.forecast.remaining(after=done)
        cap = ticket.request.max_output_tokens - done
        per_token = ticket.footprint.per_step / ticket.request.sequences**0.5
        self._ledger.reforecast(
            ticket.lease, steps=min(round(left.mean), max(1, cap)), spread=left.deviation * per_token
        )

    def _updated_forecast(self, ticket: Ticket, said: LengthForecast, done: int) -> LengthForecast:
        """What answers that ended meanwhile have taught. The engine, which looks at the tokens so far by
        itself, hears of it only if it matters."""
        if done < _REFORECAST_FROM_TOKENS:
            return said
        found = self._lengths.forecast(ticket.request, default=said)
        before = said.expected_remaining(done)
        if abs(found.expected_remaining(done) - before) <= _MATERIAL_CHANGE * before:
            return said
        self._generators[ticket.request.model].set_forecast(ticket.request.id, found)
        return found
