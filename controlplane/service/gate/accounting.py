"""Accounts for tokens and ends of requests: lease, timeline, metrics, rate limits and predictors."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from controlplane.core.clock import Duration, Instant, between
from controlplane.core.decision import Outcome
from controlplane.core.forecast import LengthForecast
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Phase, Request, Timeline
from controlplane.metrics import Metrics
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.gate.policies import Policies
from controlplane.service.gate.prefix_leases import PrefixLeases
from controlplane.service.gate.rate_limits import RateLimiter
from controlplane.service.prediction.fail_open import GuardedLengthPredictor, Subject
from controlplane.service.prediction.ttft_forecasts import TtftPredictor
from controlplane.service.request_recorder import RequestRecorder
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ObservedPace, ReportedPace

log = logging.getLogger(__name__)

# The engine gets a new forecast if it changes the expected remaining length by more than this share.
_MATERIAL_CHANGE = 0.25
# Up to Python 3.11, looking up a member of an enumeration takes 0.1 us, which is much for every token.
_PREFILL = Phase.PREFILL
# Before this many output tokens few other requests have ended since the forecast was made.
_REFORECAST_FROM_TOKENS = 32


def computed_tokens(request: Request, outcome: Outcome, output_tokens: int) -> int:
    """Tokens that an engine computed for a request that ended with `output_tokens` of each sequence."""
    was_started = outcome in (Outcome.MET, Outcome.LATE) or output_tokens
    return output_tokens * request.choices + (request.prefill_tokens if was_started else 0)


class Accounting:
    """Records the tokens of each request, and ends it exactly once.

    Tokens grow the lease, train the time models and correct the length forecast. The end closes the lease,
    charges the output, counts the outcome and trains the length predictor.
    """

    def __init__(
        self,
        ledger: MemoryLedger,
        metrics: Metrics,
        rates: RateLimiter,
        tenants: TenantQueues,
        lengths: GuardedLengthPredictor,
        pace_estimator: ObservedPace | ReportedPace,
        ttft: TtftPredictor,
        generators: Mapping[str, Generator],
        prefixes: PrefixLeases,
        recorder: RequestRecorder,
    ) -> None:
        self._recorder = recorder
        self.served_tokens: Counter[str] = Counter()
        """Prompt and output tokens of each tenant since the start."""
        self.on_end: list[Callable[[Ticket], None]] = []
        """Called with each request that has ended; they must not raise."""
        self._ledger = ledger
        self._prefixes = prefixes
        self._metrics = metrics
        self._rates = rates
        self._tenants = tenants
        self._lengths = lengths
        self._pace_estimator = pace_estimator
        self._ttft = ttft
        self._generators = generators
        self._pace_guard = lengths.fail_open[Subject.PACE]
        self._length_guard = lengths.fail_open[Subject.REMAINING_LENGTH]

    def set_policies(self, policies: Policies) -> None:
        """Applies the rate limits, tenant weights and number of remembered requests of `policies`."""
        self._rates.set_limits(policies.tenant_limits)
        self._tenants.set_weights(policies.tenant_weights)
        self._recorder.remember(policies.explained_requests)

    def release(self, ticket: Ticket) -> None:
        """Closes the lease without ending the request."""
        if ticket.lease is None:
            return
        try:
            self._prefixes.release(ticket)
        except Exception:
            # A defect; a lease that stays open would stop every later cycle.
            log.exception("%s: the cached prefix is not released", ticket.request.id)
        self._ledger.close(ticket.lease)
        ticket.lease = None

    def count_tokens(self, ticket: Ticket, now: Instant, steps: int) -> None:
        """Records `steps` new tokens of the longest sequence, and grows the lease by them."""
        timeline = ticket.timeline
        if ticket.phase is _PREFILL:
            with self._pace_guard:
                self._observe_first_token(ticket, now)
            ticket.move(Phase.DECODE)
        elif self._pace_estimator.is_timed_by_tokens and ticket.phase is Phase.DECODE:
            with self._pace_guard:
                self._observe_gap(timeline, now, steps)
        timeline.stamp_tokens(now, steps)
        if ticket.lease is not None:
            left = self._ledger.grow(ticket.lease, steps)
            done = timeline.output_tokens
            # At powers of two: often while little is known, then rarely. Also when the forecast is exhausted.
            if left == 1 or not done & (done - 1):
                with self._length_guard:
                    self._reforecast(ticket)

    def _observe_gap(self, timeline: Timeline, now: Instant, steps: int) -> None:
        if timeline.last_token is not None:
            self._pace_estimator.observe_step(Duration(between(timeline.last_token, now) // steps))

    def _observe_first_token(self, ticket: Ticket, now: Instant) -> None:
        """Observes the first token since the request was dispatched, or dispatched again."""
        timeline = ticket.timeline
        self._ttft.first_token(ticket, now)
        if timeline.first_token is None and timeline.dispatched is not None:
            self._metrics.count_prompt_tokens(ticket.request, ticket.cache_hit_tokens)
            self._prefixes.report(ticket)
            self._recorder.first_token(ticket, between(ticket.request.arrival, now))
            took = between(timeline.dispatched, now)
            computed = ticket.request.prompt_tokens - ticket.cache_hit_tokens
            self._pace_estimator.observe_prefill(computed, took)

    def end(self, ticket: Ticket, now: Instant, outcome: Outcome | None) -> None:
        """Ends the request; with outcome None it finished, and its timeline says whether in time."""
        request, timeline = ticket.request, ticket.timeline
        if timeline.dispatched is None:
            self._tenants.refund(ticket)
        self._rates.charge_output(request.tenant, now, request.charged_tokens(timeline.output_tokens))
        self.release(ticket)
        ticket.move(Phase.FINISHED)
        timeline.finished = now
        if outcome is None:
            outcome = Outcome.MET if all(timeline.objectives_met(request.slo).values()) else Outcome.LATE
        ticket.outcome = outcome
        self._ttft.withdraw(request)
        self._recorder.ended(ticket, now, outcome)
        if tokens := computed_tokens(request, outcome, timeline.output_tokens):
            self.served_tokens[request.tenant] += tokens
        self._metrics.count_outcome(request, timeline, outcome)
        if ticket.is_explored:
            self._metrics.count_explored(request, outcome)
        for listener in self.on_end:
            listener(ticket)
        # Ended requests are remembered, and the hashes of a long prompt take hundreds of kilobytes.
        ticket.prompt_blocks = ()
        if request.kind is not Kind.GENERATE:
            return
        if outcome in (Outcome.MET, Outcome.LATE):
            self._lengths.observe(request, timeline.output_tokens)
        else:
            self._lengths.withdraw(request)

    def _reforecast(self, ticket: Ticket) -> None:
        """Updates the forecast of the remaining tokens in the lease."""
        if ticket.forecast is None or ticket.lease is None:
            return
        done = ticket.timeline.output_tokens
        ticket.forecast = self._updated_forecast(ticket, ticket.forecast, done)
        left = round(ticket.forecast.mean_remaining(done))
        cap = ticket.request.max_output_tokens - done
        self._ledger.reforecast(ticket.lease, steps=min(left, max(1, cap)))

    def _updated_forecast(self, ticket: Ticket, previous: LengthForecast, done: int) -> LengthForecast:
        """The forecast by the present length model, sent to the engine if it differs materially.

        The engine conditions a forecast on the tokens so far by itself.
        """
        if done < _REFORECAST_FROM_TOKENS:
            return previous
        found = self._lengths.forecast(ticket.request, default=previous)
        before = previous.expected_remaining(done)
        if abs(found.expected_remaining(done) - before) <= _MATERIAL_CHANGE * before:
            return previous
        self._generators[ticket.request.model].set_forecast(ticket.request.id, found)
        return found
