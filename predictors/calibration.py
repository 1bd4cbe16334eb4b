"""How good were the forecasts lately? Share of answers within the stated quantile, and the mean error.

Rule: each forecast is judged as it stood when it was made, against what then happened, over the last
`window` outcomes of each class.
"""

from collections import deque
from dataclasses import dataclass, field

LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class Forecasted:
    """What was said of one answer, in tokens."""

    median: float
    upper: float


@dataclass(slots=True)
class _Recent:
    window: int
    outcomes: deque[tuple[bool, float]] = field(default_factory=deque)
    covered: int = 0
    error: float = 0.0

    def add(self, *, is_covered: bool, error: float) -> None:
        self.outcomes.append((is_covered, error))
        self.covered += is_covered
        self.error += error
        if len(self.outcomes) > self.window:
            was_covered, old = self.outcomes.popleft()
            self.covered -= was_covered
            self.error -= old


@dataclass(slots=True)
class Calibration:
    """`forget_after` bounds the forecasts kept whose requests never finish."""

    window: int = 512
    forget_after: int = 16_384
    _open: dict[str, Forecasted] = field(default_factory=dict)
    _recent: dict[str, _Recent] = field(default_factory=dict)

    def stated(self, request_id: str, *, median: float, upper: float) -> None:
        """The first forecast of a request is the one that it is judged by."""
        if request_id in self._open:
            return
        self._open[request_id] = Forecasted(median, upper)
        if len(self._open) > self.forget_after:
            del self._open[next(iter(self._open))]

    def happened(self, request_id: str, class_name: str, tokens: int) -> None:
        said = self._open.pop(request_id, None)
        if said is None:
            return
        recent = self._recent.get(class_name)
        if recent is None:
            recent = self._recent[class_name] = _Recent(self.window)
        recent.add(is_covered=tokens <= said.upper, error=abs(tokens - said.median))

    def coverage(self) -> dict[str, float]:
        """By class: share of answers no longer than the 0.9 quantile forecast for them."""
        return {name: r.covered / len(r.outcomes) for name, r in self._recent.items()}

    def mean_absolute_error(self) -> dict[str, float]:
        """By class, in tokens, of the median."""
        return {name: max(0.0, r.error) / len(r.outcomes) for name, r in self._recent.items()}
