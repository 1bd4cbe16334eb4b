"""How much embedding work will arrive in the next window? Requests and tokens, as quantiles.

Rule: arrivals are counted in windows of equal length; the counts and the token sums are two series, each
forecast by `series`. An idle time longer than a few windows counts as those few: what was
learned of the load says little after it.
"""

from dataclasses import dataclass

from controlplane.core.clock import Duration, Instant, after, between, to_seconds
from predictors.load.series import LEVELS, SeriesForecaster

_MAX_IDLE_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """Of one whole window; both at LEVELS."""

    arrivals: tuple[float, ...]
    tokens: tuple[float, ...]

    def tokens_within(self, level: float) -> float:
        """Not exceeded with at least this probability; `level` is at most the highest of LEVELS."""
        return next(tokens for at, tokens in zip(LEVELS, self.tokens, strict=True) if at >= level)


class EmbeddingLoad:
    """`arrived` for each request; `next_window` whenever it matters."""

    def __init__(self, window: Duration) -> None:
        self.window = window
        self.arrivals = SeriesForecaster()
        self.tokens = SeriesForecaster()
        self._until: Instant | None = None
        self._count = 0
        self._sum = 0

    def arrived(self, now: Instant, tokens: int) -> None:
        self._close_until(now)
        self._count += 1
        self._sum += tokens

    def next_window(self, now: Instant) -> LoadForecast | None:
        """None while too little was seen."""
        self._close_until(now)
        if self.arrivals.quantiles is None or self.tokens.quantiles is None:
            return None
        return LoadForecast(self.arrivals.quantiles, self.tokens.quantiles)

    def tokens_per_second(self) -> float:
        return self.tokens.mean / to_seconds(self.window)

    def _close_until(self, now: Instant) -> None:
        if self._until is None:
            self._until = after(now, self.window)
        missed = between(self._until, now) // self.window + 1
        for _ in range(min(missed, _MAX_IDLE_WINDOWS)):
            self.arrivals.observe(self._count)
            self.tokens.observe(self._sum)
            self._count = self._sum = 0
        if missed > 0:
            self._until = after(self._until, Duration(self.window * missed))
