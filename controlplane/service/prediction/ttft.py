"""When will a request that starts now see its first token, and how good were such forecasts?

Rule: what is said when a request is sent to the engine is judged when its first token appears. Only an
undisturbed first start teaches: one that was preempted before its first token says nothing of the work.
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter

from controlplane.core.clock import Duration, Instant, between, to_milliseconds, to_seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import Generator
from controlplane.core.request import Kind, Owner, Phase
from controlplane.metrics import Metrics, Readings
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.service.ticket import EngineStart, Ticket
from predictors.calibration import LEVEL, Calibration
from predictors.timing.step_time import ObservedPace, ReportedPace
from predictors.timing.ttft import Ahead, TtftModel, steps_until_slot

_LEVELS = (0.5, LEVEL)


class TtftPredictor:
    """`calibration` is in milliseconds, from arrival, by class."""

    def __init__(
        self,
        generators: Mapping[str, Generator],
        paces: Mapping[Owner, ObservedPace | ReportedPace],
        tickets: Mapping[str, Ticket],
    ) -> None:
        self._tickets = tickets
        self._generators = generators
        self._paces = paces
        self._model = TtftModel()
        self.calibration = Calibration()

    def dispatched(self, ticket: Ticket, wait: Duration, now: Instant) -> None:
        """The ticket, which has its lease, goes to the engine, which makes it wait so long if it orders."""
        request = ticket.request
        pace = self._paces[request.kind.owner].pace_of(request.model)
        if pace is None:
            return
        if request.kind is Kind.EMBED:
            work = work_before_deadline(request, ticket.footprint, pace)
            ticket.predicted_ttft = Duration(between(request.arrival, now) + work)
            return
        generator = self._generators[request.model]
        if generator.orders:
            ahead = Ahead(request.prompt_tokens, turn=wait)
        else:
            ahead = _ahead(ticket, self._tickets.values(), generator.max_running)
        said = self._model.predict(ahead, pace)
        ticket.engine_start = EngineStart(now, ahead, pace, said)
        waited = between(request.arrival, now)
        ticket.predicted_ttft = Duration(waited + said.median)
        stated = (to_milliseconds(ticket.predicted_ttft), to_milliseconds(Duration(waited + said.upper)))
        self.calibration.stated(request.id, (0.5, LEVEL), stated)

    def first_token(self, ticket: Ticket, now: Instant) -> None:
        """Its first token."""
        starting, request = ticket.engine_start, ticket.request
        if starting is None:
            return
        ticket.engine_start = None
        took = between(starting.at, now)
        self._model.observe(starting.ahead, starting.pace, starting.said, took)
        since_arrival = to_milliseconds(between(request.arrival, now))
        self.calibration.happened(request.id, request.service_class.name, round(since_arrival))

    def readings(self, metrics: Metrics) -> Readings:
        errors = self.calibration.mean_absolute_error()
        gaps = {f"{level:g}": self._paces[Owner.LLM].foretold_gap(level) for level in _LEVELS}
        return {
            metrics.tpot_forecast: {level: to_seconds(gap) for level, gap in gaps.items() if gap is not None},
            metrics.ttft_coverage: self.calibration.coverage(),
            metrics.ttft_error: {name: error / 1_000 for name, error in errors.items()},
        }


def _ahead(ticket: Ticket, others: Iterable[Ticket], slots: int) -> Ahead:
    """Those that have no first token yet are read before it; those that go by rank first start first."""
    decoding: list[float] = []
    earlier: list[tuple[int, float]] = []
    unread = ticket.request.prompt_tokens
    for number, other in enumerate(others):
        if other is ticket or other.lease is None or other.forecast is None:
            continue
        steps = _remaining_steps(other.forecast, other.timeline.output_tokens, _golden_level(number))
        if other.phase is Phase.DECODE:
            decoding.append(steps)
        elif other.phase is Phase.PREFILL and other.rank <= ticket.rank:
            earlier.append((other.rank, steps))
            unread += other.request.prompt_tokens
    in_turn = [steps for _, steps in sorted(earlier, key=itemgetter(0))]
    return Ahead(unread, steps_until_slot(decoding, in_turn, slots))


def _remaining_steps(forecast: LengthForecast, done: int, level: float) -> float:
    """At this level of what is thought possible after so many tokens."""
    gone = forecast.level_of(done) if done else 0.0
    return max(1.0, forecast.quantile(gone + level * (1.0 - gone)) - done)


def _golden_level(number: int) -> float:
    """Levels that fill the span from 0 to 1 evenly, whichever few in a row are taken (golden ratio): of many
    answers of which the same is known, the first to end is short."""
    return (0.5 + number * 0.618034) % 1.0
