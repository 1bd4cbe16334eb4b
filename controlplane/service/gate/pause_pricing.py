"""Prices a pause of the engine, which `pass_size` weighs against the value of an embedding pass."""

from collections.abc import Mapping

from controlplane.core.clock import Duration, Instant, after, between, to_seconds
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import PauseCost
from controlplane.core.request import Kind, Owner
from controlplane.policy.sharing.expected_arrivals import Arrival, ExpectedArrivals
from controlplane.policy.sharing.pass_size import MeanPace, PauseCosts, TimeLeft, WeightedSlo
from controlplane.service.gate.engine_lease_sync import EngineLeases
from controlplane.service.ticket import Ticket
from predictors.timing.online_step_time import ObservedPace, ReportedPace

# Steps are never expected to take more than this multiple of their own time, however much prefills took.
_MAX_STRETCH = 20.0


class PausePricing:
    """Prices a pause for the generations in the engine and for those that will arrive during it.

    Args:
        tickets: all requests, in order of arrival.
        ledger: has a lease for each request in the engine.
        estimator: of the pace of the LLM.
        engine: knows which requests wait for a place in it; None: none waits.
    """

    def __init__(
        self,
        tickets: Mapping[str, Ticket],
        ledger: MemoryLedger,
        estimator: ObservedPace | ReportedPace,
        engine: EngineLeases | None,
    ) -> None:
        self._tickets = tickets
        self._ledger = ledger
        self._estimator = estimator
        self._engine = engine
        self._arrivals = ExpectedArrivals()

    def admitted(self, ticket: Ticket, now: Instant) -> None:
        """Counts a generation that was admitted with the time to the first token of its class.

        With one of its own, that hardly any pass allows, a client could stop the passes of others.
        """
        request, pace = ticket.request, self._estimator.pace
        ttft = request.service_class.slo.ttft
        if request.kind is not Kind.GENERATE or pace is None or ttft is None or request.slo.ttft != ttft:
            return
        step = self._estimator.own_step or pace.step
        work = request.prefill_tokens * to_seconds(pace.per_prompt_token) + to_seconds(step)
        spare = to_seconds(ttft) - work
        self._arrivals.record(Arrival(now, spare, request.service_class.weight))

    def cost(self, now: Instant) -> PauseCost | None:
        """What an embedding pass from now on costs; None if no generation is in the engine."""
        estimator, pace = self._estimator, self._estimator.pace
        # `own_step` excludes the delay by embedding passes, which are priced one by one.
        if (own_step := estimator.own_step) is None:
            own_step = Duration(0) if pace is None else pace.step
        stretch = min(_MAX_STRETCH, 1 / max(1e-9, 1 - estimator.prefill_share))
        step = to_seconds(own_step) * stretch
        per_prompt_token = 0.0 if pace is None else to_seconds(pace.per_prompt_token)
        remaining = self._ledger.remaining_steps(Owner.LLM)
        running, waiting, prompt_tokens, generate = list[WeightedSlo](), list[WeightedSlo](), 0, Kind.GENERATE
        for ticket in self._tickets.values():
            request = ticket.request
            if ticket.lease is None or request.kind is not generate:
                continue
            first = 0.0
            if ticket.timeline.first_token is None:
                # Prompts that arrived before are computed before, in the same step at the latest.
                prompt_tokens += request.prefill_tokens
                first = max(_forecast_seconds(ticket, now), prompt_tokens * per_prompt_token + step)
            objectives = _objectives(ticket, remaining[request.id], first, step, now)
            slo = WeightedSlo(request.service_class.weight, objectives)
            has_place = self._engine is None or self._engine.has_started(ticket)
            (running if has_place else waiting).append(slo)
        if not running and not waiting:
            return None
        return PauseCosts(running, waiting, stretch, estimator.pass_delay, self._arrivals.costs(now))


def _objectives(
    ticket: Ticket, remaining: int, first: float, step: float, now: Instant
) -> tuple[TimeLeft | MeanPace, ...]:
    """The objectives of a request in the engine.

    `first` is the time to its first token and `step` that of a step with the share that prefills take, both
    in seconds without a pause.
    """
    request, timeline = ticket.request, ticket.timeline
    slo = request.slo
    found: list[TimeLeft | MeanPace] = []
    if timeline.first_token is None or timeline.last_token is None:
        if slo.ttft is not None:
            found.append(_time_left(timeline.arrival, slo.ttft, first, now))
    else:
        if slo.tpot is not None:
            elapsed = to_seconds(between(timeline.first_token, now))
            done, limit = timeline.output_tokens, request.max_output_tokens
            pace = MeanPace.of(to_seconds(slo.tpot), elapsed, step, done, limit, remaining, ticket.forecast)
            found.append(pace)
        if slo.gap is not None:
            found.append(_time_left(timeline.last_token, slo.gap, step, now))
    if slo.e2e is not None:
        found.append(_time_left(timeline.arrival, slo.e2e, first + step * remaining, now))
    return tuple(found)


def _time_left(start: Instant, objective: Duration, work: float, now: Instant) -> TimeLeft:
    return TimeLeft(to_seconds(between(now, after(start, objective))) - work)


def _forecast_seconds(ticket: Ticket, now: Instant) -> float:
    """The time left of the TTFT forecast that was made at dispatch; 0 if it has passed or there is none."""
    if (start := ticket.engine_start) is None:
        return 0.0
    return max(0.0, to_seconds(start.forecast.median) - to_seconds(between(start.at, now)))
