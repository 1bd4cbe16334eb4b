"""Scores forecasts: quantiles per service class, and the times that a model of the device expects.

The first forecast of a request is compared with its outcome, over the last `window` outcomes of each class:
coverage, error, bias, pinball loss and drift, which compares the most recent eighth of them with all of them.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import log

LEVEL = 0.9
"""Quantile level of which the coverage is reported."""
_DRIFT_PARTS = 8


@dataclass(frozen=True, slots=True)
class StatedForecast:
    """Quantiles forecast for one request: values at ascending levels, which include 0.5 and LEVEL."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """Quantile at `level`, which must be one of `levels`."""
        return self.values[self.levels.index(level)]


class _Outcomes:
    """The scores of the last `window` outcomes of one class, in columns: a sum takes microseconds."""

    __slots__ = ("bias", "covered", "error", "log_ratio", "pinball")

    def __init__(self, window: int) -> None:
        self.covered: deque[float] = deque(maxlen=window)
        self.error: deque[float] = deque(maxlen=window)
        self.bias: deque[float] = deque(maxlen=window)
        self.pinball: deque[float] = deque(maxlen=window)
        self.log_ratio: deque[float] = deque(maxlen=window)

    def add(self, forecast: StatedForecast, outcome: int) -> None:
        median = forecast.at(0.5)
        losses = [
            max(lv * (outcome - q), (lv - 1) * (outcome - q))
            for lv, q in zip(forecast.levels, forecast.values, strict=True)
        ]
        self.covered.append(float(outcome <= forecast.at(LEVEL)))
        self.error.append(abs(outcome - median))
        self.bias.append(median - outcome)
        self.pinball.append(sum(losses) / len(losses))
        self.log_ratio.append(log(max(1, outcome) / max(1.0, median)))


def _mean(values: Collection[float]) -> float:
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
    _recent: dict[str, _Outcomes] = field(default_factory=dict)

    def record_forecast(self, request_id: str, levels: tuple[float, ...], values: tuple[float, ...]) -> None:
        """Records the forecast of a request; later forecasts of the same request are ignored."""
        if request_id in self._pending:
            return
        self._pending[request_id] = StatedForecast(levels, values)
        if len(self._pending) > self.forget_after:
            del self._pending[next(iter(self._pending))]

    def record_outcome(self, request_id: str, class_name: str, outcome: int) -> None:
        """Scores the forecast of a request against its outcome; does nothing if there is no forecast."""
        if (forecast := self._pending.pop(request_id, None)) is not None:
            if (recent := self._recent.get(class_name)) is None:
                recent = self._recent[class_name] = _Outcomes(self.window)
            recent.add(forecast, outcome)

    def discard(self, request_id: str) -> None:
        """Drops the forecast of a request that will have no outcome."""
        self._pending.pop(request_id, None)

    def coverage(self) -> dict[str, float]:
        """Per class: share of outcomes at or below their forecast 0.9 quantile."""
        return self._means(lambda recent: recent.covered)

    def mean_absolute_error(self) -> dict[str, float]:
        """Per class: mean absolute error of the forecast median."""
        return self._means(lambda recent: recent.error)

    def bias(self) -> dict[str, float]:
        """Per class: mean of forecast median minus outcome; positive if the forecasts are too high."""
        return self._means(lambda recent: recent.bias)

    def pinball(self) -> dict[str, float]:
        """Per class: pinball loss, averaged over the levels of a forecast and over the outcomes."""
        return self._means(lambda recent: recent.pinball)

    def drift(self) -> dict[str, float]:
        """Per class: change of the mean log ratio of outcome to forecast median, recent part against window.

        0 while nothing changes; positive if outcomes now exceed their forecasts more than before.
        """
        found = {}
        for name, recent in self._recent.items():
            ratios = list(recent.log_ratio)
            found[name] = _mean(ratios[-max(1, len(ratios) // _DRIFT_PARTS) :]) - _mean(ratios)
        return found

    def _means(self, column: Callable[[_Outcomes], Collection[float]]) -> dict[str, float]:
        return {name: _mean(column(recent)) for name, recent in self._recent.items()}


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
