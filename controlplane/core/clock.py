"""What time is it, and how long is that? Integer nanoseconds on one host's monotonic clock.

Instants and durations are distinct types, so adding two instants or comparing one with wall time
does not type-check. Seconds and milliseconds exist only at the edges.
"""

from typing import NewType, Protocol

Instant = NewType("Instant", int)
Duration = NewType("Duration", int)

NO_TIME = Duration(0)

_NS_PER_SECOND = 1_000_000_000
_NS_PER_MILLISECOND = 1_000_000


class Clock(Protocol):
    """Supplies `now`; the server, the engine and the simulator each bring their own."""

    def now(self) -> Instant: ...


def seconds(value: float) -> Duration:
    return Duration(round(value * _NS_PER_SECOND))


def milliseconds(value: float) -> Duration:
    return Duration(round(value * _NS_PER_MILLISECOND))


def to_seconds(value: Duration) -> float:
    return value / _NS_PER_SECOND


def to_milliseconds(value: Duration) -> float:
    return value / _NS_PER_MILLISECOND


def after(start: Instant, elapsed: Duration) -> Instant:
    return Instant(start + elapsed)


def between(start: Instant, end: Instant) -> Duration:
    """Negative when `end` came first."""
    return Duration(end - start)


def scaled(value: Duration, factor: float) -> Duration:
    return Duration(round(value * factor))
