"""TTFT forecasts at dispatch, their calibration, and the training of their model.

A forecast is compared with the request's first token. A request that was preempted before its first token is
left out, since its time does not depend on the work ahead of it alone.
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter

from controlplane.core.clock import Duration, Instant, between, scaled, to_milliseconds, to_seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Phase, Request
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.service.ticket import EngineStart, Ticket
from predictors.calibration import LEVEL, Calibration
from predictors.timing.pace_estimators import PaceEstimators
from predictors.timing.ttft_model import TtftModel, WorkAhead, steps_until_slot

_LEVELS = (0.5, LEVEL)


class TtftPredictor:
    """Predicts the time to first token when a request is sent to its engine.

    `calibration` compares milliseconds from arrival, by service class.
    """

    def __init__(
        self,
        generators: Mapping[str, Generator],
        pace_estimators: PaceEstimators,
        tickets: Mapping[str, Ticket],
    ) -> None:
        self._tickets = tickets
        self._generators = generators
        self._pace_estimators = pace_estimators
        self._model = TtftModel()
        self.calibration = Calibration()

    @property
    def optimism(self) -> float:
        """Factor that scales a predicted wait for memory down (`TtftModel.optimism`)."""
        return self._model.optimism

    def expected_wait(self, wait: Duration) -> Duration:
        """A predicted wait for memory or slots, corrected by the median error of recent ones."""
        return scaled(wait, self._model.wait_ratio)

    def dispatched(self, ticket: Ticket, wait: Duration, now: Instant) -> None:
        """Sets the forecast of a request that is sent to its engine now.

        `wait` is the predicted wait inside an engine that uses Tandem's scheduler.
        """
        request = ticket.request
        pace = self._pace_estimators.of(request.kind.owner).pace_of(request.model)
        if pace is None:
            return
        if request.kind is Kind.EMBED:
            work = work_before_deadline(request, ticket.footprint, pace)
            ticket.predicted_ttft = Duration(between(request.arrival, now) + work)
            return
        generator = self._generators[request.model]
        if generator.has_tandem_scheduler:
            ahead = WorkAhead(request.prefill_tokens, queue_wait=wait)
        else:
            ahead = _ahead(ticket, self._tickets.values(), generator.max_running)
        forecast = self._model.predict(ahead, pace)
        ticket.engine_start = EngineStart(now, ahead, pace, forecast)
        waited = between(request.arrival, now)
        ticket.predicted_ttft = Duration(waited + forecast.median)
        ticket.predicted_ttft_upper = Duration(waited + forecast.upper)
        stated = (to_milliseconds(ticket.predicted_ttft), to_milliseconds(ticket.predicted_ttft_upper))
        self.calibration.record_forecast(request.id, _LEVELS, stated)

    def first_token(self, ticket: Ticket, now: Instant) -> None:
        """Trains the model with the request's first token."""
        start, request = ticket.engine_start, ticket.request
        if start is None:
            return
        ticket.engine_start = None
        took = between(start.at, now)
        self._model.observe(start.ahead, start.pace, start.forecast, took)
        since_arrival = to_milliseconds(between(request.arrival, now))
        self.calibration.record_outcome(request.id, request.service_class.name, round(since_arrival))

    def withdraw(self, request: Request) -> None:
        """Forgets the forecast of a request that has ended; does nothing after its first token."""
        self.calibration.discard(request.id)

    def readings(self, metrics: Metrics) -> Readings:
        """The TPOT forecast, and coverage and error of the TTFT forecasts, in seconds."""
        errors = self.calibration.mean_absolute_error()
        llm = self._pace_estimators.llm
        gaps = {f"{level:g}": llm.predicted_token_gap(level) for level in _LEVELS}
        return {
            metrics.tpot_forecast: {level: to_seconds(gap) for level, gap in gaps.items() if gap is not None},
            metrics.ttft_coverage: self.calibration.coverage(),
            metrics.ttft_error: {name: error / 1_000 for name, error in errors.items()},
        }


def _ahead(ticket: Ticket, others: Iterable[Ticket], slots: int) -> WorkAhead:
    """The work that the engine does before this request's first token.

    Prompts of requests of lower rank that have no first token yet are computed first, and those requests get
    a slot first.
    """
    decoding: list[float] = []
    earlier: list[tuple[int, float]] = []
    prompt_tokens = ticket.request.prefill_tokens
    for number, other in enumerate(others):
        if other is ticket or other.lease is None or other.forecast is None:
            continue
        steps = _remaining_steps(other.forecast, other.timeline.output_tokens, _golden_level(number))
        if other.phase is Phase.DECODE:
            decoding.append(steps)
        elif other.phase is Phase.PREFILL and other.engine_rank <= ticket.engine_rank:
            earlier.append((other.engine_rank, steps))
            prompt_tokens += other.request.prefill_tokens
    slot_order = [steps for _, steps in sorted(earlier, key=itemgetter(0))]
    return WorkAhead(prompt_tokens, steps_until_slot(decoding, slot_order, slots))


def _remaining_steps(forecast: LengthForecast, done: int, level: float) -> float:
    """The `level` quantile of the remaining tokens, given that `done` have been generated."""
    passed = forecast.level_of(done) if done else 0.0
    return max(1.0, forecast.quantile(passed + level * (1.0 - passed)) - done)


def _golden_level(number: int) -> float:
    """The n-th point of the golden-ratio sequence, which fills [0, 1) evenly for any run of numbers.

    Requests with equal forecasts so get different lengths, and the first of them to end is a short one.
    """
    return (0.5 + number * 0.618034) % 1.0
