"""Scores forecasts: quantiles per service class, and the times that a model of the device expects.

The first forecast of a request is compared with its outcome, over the last `window` outcomes of each class:
coverage, error, bias, pinball loss and drift, which compares the most recent eighth of them with all of them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log

LEVEL = 0.9
"""Quantile level of which the coverage is reported."""
_DRIFT_PARTS = 8


@dataclass(frozen=True, slots=True)
class StatedForecast:
    """Quantiles forecast for one request: values at ascending levels, which include 0.5 and LEVEL."""

    levels: tuple[float, ...]
    tokens: tuple[float, ...]

    def at(self, level: float) -> float:
        """Quantile at `level`, which must be one of `levels`."""
        return self.tokens[self.levels.index(level)]


@dataclass(frozen=True, slots=True)
class _Outcome:
    covered: float
    error: float
    bias: float
    pinball: float
    log_ratio: float


def _outcome(forecast: StatedForecast, tokens: int) -> _Outcome:
    median = forecast.at(0.5)
    losses = [
        max(lv * (tokens - q), (lv - 1) * (tokens - q))
        for lv, q in zip(forecast.levels, forecast.tokens, strict=True)
    ]
    return _Outcome(
        covered=float(tokens <= forecast.at(LEVEL)),
        error=abs(tokens - median),
        bias=median - tokens,
        pinball=sum(losses) / len(losses),
        log_ratio=log(max(1, tokens) / max(1.0, median)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(slots=True)
class Calibration:
    """Rolling scores of the forecasts of one predictor.

    The scores are stated in the unit of the forecasts: tokens for output lengths, milliseconds for times. At
    most `forget_after` forecasts without an outcome are kept; the oldest is dropped first.
    """

    window: int = 512
    forget_after: int = 4_096
    _pending: dict[str, StatedForecast] = field(default_factory=dict)
    _recent: dict[str, deque[_Outcome]] = field(default_factory=dict)

    def record_forecast(self, request_id: str, levels: tuple[float, ...], tokens: tuple[float, ...]) -> None:
        """Records the forecast of a request; later forecasts of the same request are ignored."""
        if request_id in self._pending:
            return
        self._pending[request_id] = StatedForecast(levels, tokens)
        if len(self._pending) > self.forget_after:
            del self._pending[next(iter(self._pending))]

    def record_outcome(self, request_id: str, class_name: str, tokens: int) -> None:
        """Scores the forecast of a request against its outcome; does nothing if there is no forecast."""
        if (forecast := self._pending.pop(request_id, None)) is not None:
            recent = self._recent.setdefault(class_name, deque(maxlen=self.window))
            recent.append(_outcome(forecast, tokens))

    def discard(self, request_id: str) -> None:
        """Drops the forecast of a request that will have no outcome."""
        self._pending.pop(request_id, None)

    def coverage(self) -> dict[str, float]:
        """Per class: share of outcomes at or below their forecast 0.9 quantile."""
        return self._means(lambda outcome: outcome.covered)

    def mean_absolute_error(self) -> dict[str, float]:
        """Per class: mean absolute error of the forecast median."""
        return self._means(lambda outcome: outcome.error)

    def bias(self) -> dict[str, float]:
        """Per class: mean of forecast median minus outcome; positive if the forecasts are too high."""
        return self._means(lambda outcome: outcome.bias)

    def pinball(self) -> dict[str, float]:
        """Per class: pinball loss, averaged over the levels of a forecast and over the outcomes."""
        return self._means(lambda outcome: outcome.pinball)

    def drift(self) -> dict[str, float]:
        """Per class: change of the mean log ratio of outcome to forecast median, recent part against window.

        0 while nothing changes; positive if outcomes now exceed their forecasts more than before.
        """
        return {
            name: _mean([o.log_ratio for o in list(recent)[-max(1, len(recent) // _DRIFT_PARTS) :]])
            - _mean([o.log_ratio for o in recent])
            for name, recent in self._recent.items()
        }

    def _means(self, of: Callable[[_Outcome], float]) -> dict[str, float]:
        return {name: _mean([of(outcome) for outcome in recent]) for name, recent in self._recent.items()}


class TimeCalibration:
    """Times of steps or passes against what their model expected before it learned from them.

    Sums in which an observation loses its weight over about `memory` later ones. Each weighs as much as the
    time that was expected of it.
    """

    def __init__(self, *, memory: int = 512) -> None:
        self._kept = 1.0 - 1.0 / memory
        self._expected = self._took = self._error = 0.0

    def record(self, expected: float, took: float) -> None:
        """Compares one time with the expected one, in any unit."""
        kept = self._kept
        self._expected = kept * self._expected + expected
        self._took = kept * self._took + took
        self._error = kept * self._error + abs(took - expected)

    @property
    def ratio(self) -> float | None:
        """Time over expected time; None before the first observation."""
        return self._took / self._expected if self._expected else None

    @property
    def error(self) -> float | None:
        """Mean absolute error over the mean expected time; None before the first observation."""
        return self._error / self._expected if self._expected else None
