"""Forecasts the output length from the empirical quantiles of recent outputs of the same class and model.

With fewer than `enough` outputs of the (class, model) pair, the outputs of the model over all classes are
used; with fewer of these too, the forecast is uniform from 1 to `max_tokens`. No forecast exceeds the
request's `max_output_tokens`. A request that cannot stop early is forecast at its limit and is not learned
from.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from controlplane.core.forecast import LengthForecast
from controlplane.core.memory_ledger import Floats
from controlplane.core.request import Request
from predictors.calibration import LEVEL, Calibration

_INNER_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_LEVELS = (0.0, *_INNER_LEVELS, 1.0)
_MEDIAN, _UPPER = _LEVELS.index(0.5), _LEVELS.index(LEVEL)
# Upper end of the forecast over the 0.99 quantile: a few hundred outputs say little about their last percent.
_TAIL_FACTOR = 2.0
# Outputs between two recomputations of the quantiles; a few among hundreds change them little.
_REFRESH = 8
_MOST_KEPT = 256


def _uniform_up_to(max_tokens: int) -> LengthForecast:
    return LengthForecast((0.0, 1.0), (float(min(1, max_tokens)), float(max_tokens)))


class MaxTokens:
    """Length predictor that always forecasts the token limit, as an engine without a predictor reserves."""

    def forecast(self, request: Request) -> LengthForecast:
        """All mass at the request's token limit."""
        tokens = float(request.max_output_tokens)
        return LengthForecast((0.0, 1.0), (tokens, tokens))

    def observe(self, request: Request, output_tokens: int) -> None:
        """Does nothing: there is nothing to learn."""

    def withdraw(self, request: Request) -> None:
        """Does nothing: no forecast is kept."""


@dataclass(slots=True)
class _History:
    """Recent output lengths of one class and model, ordered by time and by length."""

    window: int
    by_time: deque[int] = field(default_factory=deque)
    by_length: list[int] = field(default_factory=list)
    cached_forecasts: dict[int, LengthForecast] = field(default_factory=dict)
    logs: Floats | None = None
    outcomes_since_cache: int = 0

    def add(self, tokens: int) -> None:
        self.outcomes_since_cache += 1
        self.by_time.append(tokens)
        insort(self.by_length, tokens)
        if len(self.by_time) > self.window:
            del self.by_length[bisect_left(self.by_length, self.by_time.popleft())]

    def forecast(self, max_tokens: int) -> LengthForecast:
        """Forecast for a limit, cached so that its mean and deviation are computed once."""
        self._refresh()
        found = self.cached_forecasts.get(max_tokens)
        if found is None:
            found = self.cached_forecasts[max_tokens] = LengthForecast(_LEVELS, self._points(max_tokens))
        return found

    def log_quantiles(self, levels: Sequence[float]) -> Floats:
        self._refresh()
        if self.logs is None:
            tokens = [_quantile(self.by_length, level) for level in levels]
            self.logs = np.log(np.maximum(tokens, 1.0))
        return self.logs

    def _refresh(self) -> None:
        if self.outcomes_since_cache >= _REFRESH or len(self.cached_forecasts) >= _MOST_KEPT:
            self.cached_forecasts.clear()
            self.logs = None
            self.outcomes_since_cache = 0

    def _points(self, max_tokens: int) -> tuple[float, ...]:
        inner = [_quantile(self.by_length, level) for level in _INNER_LEVELS]
        longest = max(self.by_length[-1], _TAIL_FACTOR * inner[-1])
        return tuple(min(max_tokens, tokens) for tokens in (self.by_length[0], *inner, longest))


def _quantile(ordered: Sequence[int], level: float) -> float:
    """Interpolated order statistic at level * (n + 1), unbiased for the next draw of any distribution."""
    place = min(max(level * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class HistoryQuantiles:
    """Length predictor by empirical quantiles; `calibration` scores its forecasts.

    Args:
        window: outputs kept per class and model.
        enough: outputs needed before their quantiles are used.
    """

    def __init__(self, *, window: int = 512, enough: int = 20) -> None:
        self.calibration = Calibration(window)
        self._window = window
        self._enough = enough
        self._by_class: dict[tuple[str, str], _History] = {}
        self._by_model: dict[str, _History] = {}

    def forecast(self, request: Request) -> LengthForecast:
        """Empirical quantiles, clipped at the request's token limit."""
        if request.runs_to_limit:
            return MaxTokens().forecast(request)
        history = self._history(request)
        if history is None:
            found = _uniform_up_to(request.max_output_tokens)
            median, upper = found.quantile(0.5), found.quantile(LEVEL)
        else:
            found = history.forecast(request.max_output_tokens)
            median, upper = found.tokens[_MEDIAN], found.tokens[_UPPER]
        self.calibration.record_forecast(request.id, (0.5, LEVEL), (median, upper))
        return found

    def log_quantiles(self, request: Request, levels: Sequence[float]) -> Floats | None:
        """Quantiles of log tokens at `levels`, not clipped at the limit; None without enough history."""
        history = self._history(request)
        return None if history is None else history.log_quantiles(levels)

    def observe(self, request: Request, output_tokens: int) -> None:
        """Learns the output length of a finished request."""
        if request.runs_to_limit:
            return
        name = request.service_class.name
        self.calibration.record_outcome(request.id, name, output_tokens)
        by_class = self._by_class.setdefault((name, request.model), _History(self._window))
        by_model = self._by_model.setdefault(request.model, _History(self._window))
        by_class.add(output_tokens)
        by_model.add(output_tokens)

    def withdraw(self, request: Request) -> None:
        """Drops the forecast of a request that did not finish."""
        self.calibration.discard(request.id)

    def _history(self, request: Request) -> _History | None:
        own = self._by_class.get((request.service_class.name, request.model))
        if own is not None and len(own.by_time) >= self._enough:
            return own
        whole = self._by_model.get(request.model)
        return whole if whole is not None and len(whole.by_time) >= self._enough else None
