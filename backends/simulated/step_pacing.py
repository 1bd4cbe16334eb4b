"""Decode pacing of a simulated engine beside embedding passes, as in `backends.vllm.scheduler`."""

from typing import Any

from backends.simulated.policy_scheduler import PolicyScheduler
from controlplane.core.clock import NO_TIME, Duration, Instant, between

# Timers are due up to a rounding error early; waiting for less again would not advance the clock.
_ROUNDING = Duration(1_000)


class StepPacing:
    """Waits before a step while a pass is under way.

    Attributes:
        is_shared: whether a pass is under way.
        waited: how long the step that was begun last had been delayed.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self.waited = NO_TIME
        self._was_shared = False
        self._since: Instant | None = None

    def set_shared(self, *, is_shared: bool) -> None:
        """Notes that passes have begun to be under way, or that none is any more."""
        self.is_shared = is_shared
        self._was_shared |= is_shared

    def step_start(self, engine: PolicyScheduler[Any], now: Instant) -> Instant:
        """When the next step may start: now, or later if it waits for the pass."""
        begin = engine.paced_start(now) if self.is_shared else now
        if begin > now + _ROUNDING:
            self._since = self._since or now
            return begin
        self.waited = NO_TIME if self._since is None else between(self._since, now)
        self._since = None
        return now

    def was_alone(self) -> bool:
        """Whether no pass has been under way since the last call."""
        was_shared, self._was_shared = self._was_shared, self.is_shared
        return not was_shared
