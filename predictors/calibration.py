"""How good were the forecasts lately? Coverage, error, bias, pinball loss and drift, class by class.

Rule: each forecast is judged as it stood when it was made, against what then happened, over the last
`window` outcomes of each class. Drift compares the last eighth of them with all of them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log

LEVEL = 0.9
_LATEST = 8


@dataclass(frozen=True, slots=True)
class StatedForecast:
    """What was said of one answer: tokens at rising levels, of which 0.5 and LEVEL are two."""

    levels: tuple[float, ...]
    tokens: tuple[float, ...]

    def at(self, level: float) -> float:
        return self.tokens[self.levels.index(level)]


@dataclass(frozen=True, slots=True)
class _Outcome:
    covered: float
    error: float
    bias: float
    pinball: float
    log_ratio: float


def _outcome(said: StatedForecast, tokens: int) -> _Outcome:
    median = said.at(0.5)
    losses = [
        max(lv * (tokens - q), (lv - 1) * (tokens - q))
        for lv, q in zip(said.levels, said.tokens, strict=True)
    ]
    return _Outcome(
        covered=float(tokens <= said.at(LEVEL)),
        error=abs(tokens - median),
        bias=median - tokens,
        pinball=sum(losses) / len(losses),
        log_ratio=log(max(1, tokens) / max(1.0, median)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(slots=True)
class Calibration:
    """`forget_after` bounds the forecasts kept of requests that nobody says have ended."""

    window: int = 512
    forget_after: int = 4_096
    _pending: dict[str, StatedForecast] = field(default_factory=dict)
    _recent: dict[str, deque[_Outcome]] = field(default_factory=dict)

    def stated(self, request_id: str, levels: tuple[float, ...], tokens: tuple[float, ...]) -> None:
        """The first forecast of a request is the one that it is judged by."""
        if request_id in self._pending:
            return
        self._pending[request_id] = StatedForecast(levels, tokens)
        if len(self._pending) > self.forget_after:
            del self._pending[next(iter(self._pending))]

    def happened(self, request_id: str, class_name: str, tokens: int) -> None:
        if (said := self._pending.pop(request_id, None)) is not None:
            recent = self._recent.setdefault(class_name, deque(maxlen=self.window))
            recent.append(_outcome(said, tokens))

    def withdrawn(self, request_id: str) -> None:
        """Nothing will happen."""
        self._pending.pop(request_id, None)

    def coverage(self) -> dict[str, float]:
        """By class: share of answers no longer than the 0.9 quantile forecast for them."""
        return self._means(lambda outcome: outcome.covered)

    def mean_absolute_error(self) -> dict[str, float]:
        """By class, in tokens, of the median."""
        return self._means(lambda outcome: outcome.error)

    def bias(self) -> dict[str, float]:
        """By class, in tokens: how much longer the median was than the answers, on average."""
        return self._means(lambda outcome: outcome.bias)

    def pinball(self) -> dict[str, float]:
        """By class, in tokens: mean over the levels stated."""
        return self._means(lambda outcome: outcome.pinball)

    def drift(self) -> dict[str, float]:
        """By class: by what factor, as a logarithm, the latest answers outgrow their forecasts more than
        all in the window did; 0 while nothing changes."""
        return {
            name: _mean([o.log_ratio for o in list(recent)[-max(1, len(recent) // _LATEST) :]])
            - _mean([o.log_ratio for o in recent])
            for name, recent in self._recent.items()
        }

    def _means(self, of: Callable[[_Outcome], float]) -> dict[str, float]:
        return {name: _mean([of(outcome) for outcome in recent]) for name, recent in self._recent.items()}
