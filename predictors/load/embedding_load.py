"""Forecasts the embedding tokens that arrive in the next window, as quantiles.

Requests and their tokens are counted in windows of equal length. Both are series of `series`; that of
the requests shows the operator how bursty they are. An idle time longer than `_MAX_IDLE_WINDOWS` windows
counts as that many, because the load seen before it says little about the load after it.
"""

from dataclasses import dataclass

from controlplane.core.clock import Duration, Instant, after, between, to_seconds
from predictors.load.series import LEVELS, SeriesForecaster

_MAX_IDLE_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """Quantiles of the tokens of one window, at LEVELS."""

    tokens: tuple[float, ...]

    def tokens_within(self, level: float) -> float:
        """Tokens not exceeded with probability `level` or more; `level` <= max(LEVELS)."""
        return next(tokens for at, tokens in zip(LEVELS, self.tokens, strict=True) if at >= level)


class EmbeddingLoad:
    """Counts embedding arrivals in windows and forecasts the next one."""

    def __init__(self, window: Duration) -> None:
        self.window = window
        self.arrivals = SeriesForecaster()
        self.tokens = SeriesForecaster()
        self._until: Instant | None = None
        self._count = 0
        self._sum = 0

    def arrived(self, now: Instant, tokens: int) -> None:
        """Counts one request of `tokens` tokens."""
        self._close_until(now)
        self._count += 1
        self._sum += tokens

    def next_window(self, now: Instant) -> LoadForecast | None:
        """Forecast of the window after the current one; None until enough windows have passed."""
        self._close_until(now)
        return None if self.tokens.quantiles is None else LoadForecast(self.tokens.quantiles)

    def tokens_per_second(self) -> float:
        """Mean token rate over the last few hundred windows."""
        return self.tokens.mean / to_seconds(self.window)

    def _close_until(self, now: Instant) -> None:
        """Closes every window that ended by `now`."""
        if self._until is None:
            self._until = after(now, self.window)
        missed = between(self._until, now) // self.window + 1
        for _ in range(min(missed, _MAX_IDLE_WINDOWS)):
            self.arrivals.observe(self._count)
            self.tokens.observe(self._sum)
            self._count = self._sum = 0
        if missed > 0:
            self._until = after(self._until, Duration(self.window * missed))
