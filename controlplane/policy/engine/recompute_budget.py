"""Bound on the device's time that preemptions for urgent requests cost.

A preempted request computes its tokens again. Under lasting overload with long prompts, urgent requests could
preempt faster than the engine recomputes; it then computed prompts over and over and served nobody.
"""

from collections.abc import Iterable

from controlplane.core.clock import Duration, Instant, scaled, seconds
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState

_MOST = seconds(0.5)


class RecomputeBudget:
    """Time in which preempted tokens may be computed again: `share` of the time that passes.

    At most half a second is saved up. Every preemption is paid from it, also one for lack of memory, which is
    never refused.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left: Duration = _MOST
        self._at: Instant | None = None

    def earn(self, now: Instant) -> None:
        """Adds the share of the time since the last call; call once per step."""
        if self._at is not None:
            self._left = min(_MOST, Duration(self._left + scaled(Duration(now - self._at), self._share)))
        self._at = now

    def pay(self, preempted: Iterable[RequestState], view: EngineView) -> None:
        """Subtracts the time in which these requests will be computed again."""
        tokens = sum(state.tokens - state.cached for state in preempted)
        self._left = Duration(self._left - scaled(view.pace.per_prompt_token, tokens))

    @property
    def has_time(self) -> bool:
        """Whether an urgent request may preempt."""
        return self._left >= 0
