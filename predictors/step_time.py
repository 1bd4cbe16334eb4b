"""How fast does an owner work now? One engine step, and one prompt token beside it, learned online.

Rule: exponentially weighted means that follow the load, with each observation clipped to a factor of
four around the present value, so that one stall moves the estimate a little and a lasting change moves
it soon. Prompt tokens are weighted by their number: a long prompt says more about their cost.
"""

from controlplane.core.clock import Duration
from controlplane.core.view import Pace

_CLIP = 4.0


class ObservedPace:
    """`memory` is how many observations the estimate looks back over."""

    def __init__(self, *, memory: int = 64) -> None:
        self._rate = 1.0 / memory
        self._steps = 0
        self._step = 0.0
        self._prefills = 0
        self._per_token = 0.0
        self._weight = 0.0

    @property
    def pace(self) -> Pace | None:
        """None until something was observed. What was never observed is taken to cost nothing."""
        if self._steps == 0 and self._prefills == 0:
            return None
        return Pace(Duration(round(self._step)), Duration(round(self._per_token)))

    def observe_step(self, took: Duration) -> None:
        """The time between two tokens of one answer."""
        self._steps += 1
        # A plain mean at first, so that the first observation does not weigh for long.
        rate = max(self._rate, 1.0 / self._steps)
        self._step += rate * (_clipped(took, self._step) - self._step)

    def observe_prefill(self, prompt_tokens: int, took: Duration) -> None:
        """The time from start to first token, or to the vectors of that many tokens."""
        if prompt_tokens <= 0:
            return
        self._prefills += 1
        rate = max(self._rate, 1.0 / self._prefills)
        self._weight += rate * (prompt_tokens - self._weight)
        share = min(1.0, rate * prompt_tokens / self._weight)
        seen = max(0.0, took - self._step) / prompt_tokens
        self._per_token += share * (_clipped(seen, self._per_token) - self._per_token)


class ReportedPace:
    """For an engine that measures itself: seen from outside, a request's start is not known."""

    def __init__(self) -> None:
        self.pace: Pace | None = None

    def observe_step(self, took: Duration) -> None:
        pass

    def observe_prefill(self, prompt_tokens: int, took: Duration) -> None:
        pass


def _clipped(value: float, present: float) -> float:
    if present <= 0.0:
        return value
    return min(max(value, present / _CLIP), present * _CLIP)
