"""Integer nanoseconds on one host's monotonic clock.

Instants and durations are distinct types, so adding two instants or comparing one with wall time does not
type-check. Seconds and milliseconds exist only at the edges.
"""

from typing import NewType, Protocol

Instant = NewType("Instant", int)
Duration = NewType("Duration", int)

NO_TIME = Duration(0)

_NS_PER_SECOND = 1_000_000_000
_NS_PER_MILLISECOND = 1_000_000


class Clock(Protocol):
    """Supplies the current time; the server, the engine and the simulator each have their own."""

    def now(self) -> Instant:
        """Current instant; never decreases."""
        ...


def seconds(value: float) -> Duration:
    """Duration of `value` seconds, rounded to nanoseconds."""
    return Duration(round(value * _NS_PER_SECOND))


def milliseconds(value: float) -> Duration:
    """Duration of `value` milliseconds, rounded to nanoseconds."""
    return Duration(round(value * _NS_PER_MILLISECOND))


def to_seconds(value: Duration) -> float:
    """Duration in seconds."""
    return value / _NS_PER_SECOND


def to_milliseconds(value: Duration) -> float:
    """Duration in milliseconds."""
    return value / _NS_PER_MILLISECOND


def after(start: Instant, elapsed: Duration) -> Instant:
    """Instant `elapsed` after `start`."""
    return Instant(start + elapsed)


def between(start: Instant, end: Instant) -> Duration:
    """Time from `start` to `end`; negative if `end` is earlier."""
    return Duration(end - start)


def scaled(value: Duration, factor: float) -> Duration:
    """Duration times `factor`, rounded to nanoseconds."""
    return Duration(round(value * factor))
