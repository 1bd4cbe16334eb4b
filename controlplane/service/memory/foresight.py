"""What will ask for memory soon? Bytes to keep for embedding work, and for requests of the highest priority.

The embedding load is forecast in tokens; what they take while they are computed is at most what the batches
in flight can take. Of the generation requests, those of the highest priority are foreseen together by the
bytes that they arrive with; what of it has come already is no longer kept, nor what will be given back
before the first of them must start.
"""

from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, after, between
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Request
from controlplane.core.view import Reserve
from predictors.load.embedding_load import EmbeddingLoad
from predictors.load.series import LEVELS, SeriesForecaster

_AT_ONCE = Duration(0)


@dataclass(slots=True)
class Foresight:
    """Without a `level` nothing is kept. `high_priority` is None where all have the same; requests of it can
    wait for `patience`."""

    window: Duration
    level: float | None
    high_priority: int | None
    patience: Duration = _AT_ONCE
    load: EmbeddingLoad = field(init=False)
    high: SeriesForecaster = field(init=False, default_factory=SeriesForecaster)
    _high_bytes: int = field(init=False, default=0)
    _until: Instant | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.load = EmbeddingLoad(self.window)

    @property
    def horizon(self) -> Duration:
        """What is given back within it serves those that come in the next window."""
        return Duration(self.window + self.patience)

    def offered(self, request: Request, footprint: Footprint, now: Instant) -> None:
        if request.kind is Kind.EMBED:
            self.load.arrived(now, request.prompt_tokens)
        elif request.service_class.priority == self.high_priority:
            self._close_until(now)
            self._high_bytes += footprint.base

    def embedding_tokens(self, now: Instant) -> float:
        """That arrive in the next window at most, at the level asked for; 0 while nothing is known."""
        if self.level is None or (forecast := self.load.next_window(now)) is None:
            return 0.0
        return forecast.tokens_within(self.level)

    def reserve(self, now: Instant, *, released_bytes: int) -> Reserve | None:
        """For what of the highest priority is still to come in this window, at the level asked for, and will
        not find memory that others give back in time."""
        if self.level is None or self.high_priority is None:
            return None
        self._close_until(now)
        if self.high.quantiles is None:
            return None
        expected = next(q for at, q in zip(LEVELS, self.high.quantiles, strict=True) if at >= self.level)
        left = int(expected) - self._high_bytes - released_bytes
        return Reserve(left, self.high_priority) if left > 0 else None

    def _close_until(self, now: Instant) -> None:
        if self._until is None:
            self._until = after(now, self.window)
        while now >= self._until:
            self.high.observe(self._high_bytes)
            self._high_bytes = 0
            # After a long silence one window of it is as good as all.
            missed = max(1, between(self._until, now) // self.window)
            self._until = after(self._until, Duration(self.window * missed))
