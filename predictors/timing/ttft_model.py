"""Forecasts the time to first token: the work ahead in the engine, scaled by recent estimation errors.

The estimate is the work before the first token: the steps until a batch slot is free, the prompts queued
ahead and the request's own prompt. The forecast multiplies it by quantiles of the recent ratios of actual to
estimated time, kept separately for requests that find a free slot and for requests that wait. The 0.9
quantile is also moved by adaptive conformal inference, as in `conformal`, so that its coverage holds under
drift.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from math import exp, log

from controlplane.core.clock import NO_TIME, Duration, scaled
from controlplane.core.pool_view import Pace

_WINDOW = 96
_MIN_RATIOS = 10
_STEP = 0.06
_MAX_OFFSET = 2.0
_LOWER, _UPPER = 0.1, 0.9
# Of five runs of configs/bench/admission.yaml, this quantile was 0.09 to 0.23 once requests had waited.
_UNOBSERVED_OPTIMISM = 0.1
_MIN_NANOSECONDS = 1_000.0
"""Lower bound of estimated and actual times before their ratio is taken."""


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """Work of an engine before the first token of a request.

    Attributes:
        prompt_tokens: prompt tokens to prefill, the request's own included.
        steps_until_slot: engine steps until a batch slot is free.
        queue_wait: predicted wait in the queue of an engine with Tandem's scheduler, which fills its slots
            in an order of its own; 0 for any other engine.
    """

    prompt_tokens: int
    steps_until_slot: float = 0.0
    queue_wait: Duration = NO_TIME

    def work(self, pace: Pace) -> Duration:
        """Time of this work at `pace`."""
        prefill = pace.step + scaled(pace.per_prompt_token, self.prompt_tokens)
        return Duration(self.queue_wait + prefill + scaled(pace.step, self.steps_until_slot))

    @property
    def waits(self) -> bool:
        """Whether the request must wait before its prefill starts."""
        return self.steps_until_slot > 0.0 or self.queue_wait > 0


def steps_until_slot(running: Iterable[float], waiting: Iterable[float], slots: int) -> float:
    """Engine steps until a slot is free for a request behind the waiting queue (first come, first served).

    Args:
        running: remaining steps of each running request.
        waiting: remaining steps of each waiting request, in queue order.
        slots: batch slots of the engine.
    """
    ends = sorted(running)[-slots:]
    ends = [0.0] * (slots - len(ends)) + ends
    for steps in waiting:
        heapreplace(ends, ends[0] + steps)
    return ends[0]


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """Median and 0.9 quantile of the time from now to the first token."""

    median: Duration
    upper: Duration


@dataclass(slots=True)
class _Ratios:
    """Recent logarithms of actual over estimated time."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    ascending: list[float] = field(default_factory=list)
    offset: float = 0.0

    def add(self, ratio: float) -> None:
        self.seen.append(ratio)
        self.ascending = sorted(self.seen)

    @property
    def suffice(self) -> bool:
        return len(self.ascending) >= _MIN_RATIOS

    def at(self, level: float) -> float:
        return quantile(self.ascending, level) if self.suffice else 0.0

    def upper(self) -> float:
        return self.at(_UPPER) + self.offset


class TtftModel:
    """Online TTFT forecaster of one engine."""

    def __init__(self) -> None:
        self._ratios = {False: _Ratios(), True: _Ratios()}

    def predict(self, ahead: WorkAhead, pace: Pace) -> TtftForecast:
        """Forecast for a request with `ahead` before it."""
        work, ratios = max(_MIN_NANOSECONDS, ahead.work(pace)), self._ratios[ahead.waits]
        return TtftForecast(_duration(work * exp(ratios.at(0.5))), _duration(work * exp(ratios.upper())))

    @property
    def optimism(self) -> float:
        """The 0.1 quantile of actual over estimated time of requests that waited, at most 1.

        Never above 1: where all requests are rejected no new ratio would correct it. Before enough requests
        have waited it is 0.1, since the estimate is often several times too long.
        """
        ratios = self._ratios[True]
        return min(1.0, exp(ratios.at(_LOWER))) if ratios.suffice else _UNOBSERVED_OPTIMISM

    @property
    def wait_ratio(self) -> float:
        """The median of actual over estimated time of requests that waited."""
        return exp(self._ratios[True].at(0.5))

    def observe(self, ahead: WorkAhead, pace: Pace, stated: TtftForecast, took: Duration) -> None:
        """Learns from a first token after `took`; `pace` and the forecast `stated` are those at dispatch."""
        ratios = self._ratios[ahead.waits]
        was_covered = took <= stated.upper
        moved = ratios.offset + _STEP * (_UPPER - was_covered)
        ratios.offset = min(max(moved, -_MAX_OFFSET), _MAX_OFFSET)
        ratios.add(log(max(_MIN_NANOSECONDS, took) / max(_MIN_NANOSECONDS, ahead.work(pace))))


def quantile(ascending: Sequence[float], level: float) -> float:
    """The quantile that `numpy.quantile` interpolates linearly, to the last bit.

    For a hundred numbers numpy takes 72 us and this 0.8 us; every admission needs three quantiles.
    """
    place = (len(ascending) - 1) * level
    below = int(place)
    low, high = ascending[below], ascending[min(below + 1, len(ascending) - 1)]
    share = place - below
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def _duration(nanoseconds: float) -> Duration:
    return Duration(round(nanoseconds))
