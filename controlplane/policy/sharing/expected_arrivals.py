"""Prices an embedding pass for the generations that will arrive while it is under way (decision 0098).

One that arrives during a pass waits for its end. At a constant rate of arrivals, those that come in the
first `pause - spare` seconds of a pause are late by it, where `spare` is the part of the time to the first
token that a request's own work leaves. Those that can wait cost nothing, so that a pass which is shorter than
what all can wait is free of this cost (decision 0101). The last arrivals stand for those to come.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from controlplane.core.clock import Instant, between, to_seconds

_LAST = 64
# Of fewer the rate is not known.
_LEAST = 8
# Requests may arrive at the same time.
_SHORTEST_SECONDS = 1e-3


class Arrival(NamedTuple):
    """A generation: when it came, the seconds of its time to the first token to spare, and its weight."""

    at: Instant
    spare: float
    weight: float


class ArrivalCosts:
    """Expected number of SLOs of requests to come that a pause breaks, weighted by class.

    `arrivals` have come within the last `seconds`.
    """

    def __init__(self, arrivals: Iterable[Arrival], seconds: float) -> None:
        by_spare = sorted((arrival.spare, arrival.weight) for arrival in arrivals)
        self._spares = [spare for spare, _ in by_spare]
        # Of the first n: their weights, and these times their spare times.
        self._weights = [0.0, *accumulate(weight for _, weight in by_spare)]
        self._times = [0.0, *accumulate(weight * spare for spare, weight in by_spare)]
        self._seconds = seconds

    def __call__(self, pause: float) -> float:
        """The expected number for a pause of so many seconds."""
        count = bisect_left(self._spares, pause)
        return (pause * self._weights[count] - self._times[count]) / self._seconds


class ExpectedArrivals:
    """The last generations that were admitted with a time to the first token."""

    def __init__(self) -> None:
        self._last = deque[Arrival](maxlen=_LAST)

    def record(self, arrival: Arrival) -> None:
        """Adds an arrival; one without time to spare is late without a pass, too."""
        if arrival.spare > 0.0:
            self._last.append(arrival)

    def costs(self, now: Instant) -> ArrivalCosts | None:
        """What a pass from now on costs those to come; None before enough have come."""
        if len(self._last) < _LEAST:
            return None
        seconds = to_seconds(between(self._last[0].at, now))
        return ArrivalCosts(self._last, max(_SHORTEST_SECONDS, seconds))
