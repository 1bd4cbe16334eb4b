"""Decides how long the next embedding pass is, by the objectives that it meets and breaks.

A pass delays the engine's steps: by its time where they take turns, by less where they run at the same time
(decision 0084). `PauseCosts` predicts how many SLOs that delay breaks, weighted by class: from the length
distribution of each running request, from the time left to each that waits for a place in the engine, and
from how often generations arrive and what time they have (`expected_arrivals`). A pass meets SLOs, too:
each input is worth its share of its call's SLO, scaled by the share of the device that the pending calls
need from now on to be on time. With time to spare a pass is worth little and waits for a step at which it
costs nothing; close to a deadline it is worth as much as the class's weight. The pass takes the most urgent
inputs up to the number at which its worth less its cost is highest; at zero inputs no pass starts. Passes
without a cost would use up all time that a TPOT objective leaves, and the next delay would break it, so a
tenth of it is kept.

Neither side starves. An engine waits for passes no longer than its TPOT objectives allow (`decode_pacing`).
Calls that are late or have no deadline are worth a small fixed share, and 5 % of the time since the last pass
is free of cost.

The start cost of a pass needs no rule of its own: many inputs in one pass delay decoding by less than the
same inputs in several.

A call that arrives during a pass waits for its end. So a pass takes at most a quarter of the shortest
objective of recent calls, or eight times its start cost (decision 0090).
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from controlplane.core.clock import NO_TIME, Duration, to_seconds
from controlplane.core.forecast import LengthForecast
from controlplane.core.ports import PauseCost

# Worth of an input that no SLO depends on, as a share of its class's weight.
_NO_SLO_SHARE = 0.01
_FLOOR_SHARE = 0.05
# Less is rounding: times are whole nanoseconds.
_LEAST_REGAINED_SECONDS = 1e-9
# A pass of one input may be longer. Without the bound a pass after a long time without calls would be free.
_LONGEST_FREE_SECONDS = 0.05
# Part of a TPOT objective that passes leave to delays which nothing predicts (decision 0066).
_RESERVED_SHARE = 0.1
# Chance of a start just before the deadline, over that of a start at any time until then (decision 0064).
_LATE_START_SHARE = 0.3
# Candidate sizes of a pass differ by at least this part of the size, which bounds their number.
_SIZE_STEP = 8
# The longest pass, as a part of the shortest objective of so many recent calls.
_PASS_SHARE, _RECENT_CALLS = 0.25, 64
# A pass of this multiple of its start cost loses an eighth of the throughput; a shorter one is not required.
_LEAST_STARTS = 8


class TimeLeft(NamedTuple):
    """An objective with a fixed deadline: any pause beyond `spare` seconds breaks it."""

    spare: float

    def added_risk(self, pauses: Sequence[float]) -> list[float] | None:
        """Probability that each pause, in seconds, breaks the objective; None if none does or it is lost."""
        if self.spare < 0.0 or pauses[-1] <= self.spare:
            return None
        return [1.0 if pause > self.spare else 0.0 for pause in pauses]


class MeanPace(NamedTuple):
    """A TPOT objective, a mean over the output: later tokens regain a pause, if there are enough of them.

    Attributes:
        debt: seconds by which the output so far is behind the TPOT to be kept; negative if it is ahead.
        regained: seconds that each further token regains, that TPOT less the time of a step.
        done: output tokens so far.
        limit: most output tokens.
        expected_remaining: tokens still to come if there is no forecast.
        forecast: distribution of the output tokens.
    """

    debt: float
    regained: float
    done: int
    limit: int
    expected_remaining: int
    forecast: LengthForecast | None

    @classmethod
    def of(
        cls,
        tpot: float,
        elapsed: float,
        step: float,
        done: int,
        limit: int,
        expected_remaining: int,
        forecast: LengthForecast | None,
    ) -> "MeanPace":
        """The objective `tpot` less a reserve, or in full once the reserve is used up; times in seconds.

        Args:
            tpot: most seconds per output token after the first.
            elapsed: since the first token.
            step: expected time of a step without a pass.
            done: output tokens so far.
            limit: most output tokens.
            expected_remaining: tokens still to come if there is no forecast.
            forecast: distribution of the output tokens.
        """
        for kept in (tpot * (1 - _RESERVED_SHARE), tpot):
            debt, regained = elapsed - kept * (done - 1), kept - step
            if debt <= regained * expected_remaining:
                break
        return cls(debt, regained, done, limit, expected_remaining, forecast)

    def added_risk(self, pauses: Sequence[float]) -> list[float] | None:
        """Probability that each pause, in seconds, breaks the objective, beyond that without a pause.

        None if no pause adds any.
        """
        debt, regained = self.debt, self.regained
        if debt + pauses[-1] <= regained:
            return None
        if regained < _LEAST_REGAINED_SECONDS:
            before, *risks = [1.0 if debt + pause > regained else 0.0 for pause in (0.0, *pauses)]
        else:
            before, *risks = self._risks([(debt + pause) / regained for pause in (0.0, *pauses)])
        if before >= 1.0:
            return None
        return [risk - before if risk > before else 0.0 for risk in risks]

    def _risks(self, needed: Sequence[float]) -> list[float]:
        """Probability that fewer further tokens than each of some numbers come; these ascend."""
        done, limit = self.done, self.limit
        some = bisect_right(needed, 1.0)
        too_many = bisect_left(needed, True, some, key=lambda tokens: done + tokens > limit)
        uncertain = self._ends_before(needed[some:too_many]) if some < too_many else []
        return [0.0] * some + uncertain + [1.0] * (len(needed) - too_many)

    def _ends_before(self, needed: Sequence[float]) -> list[float]:
        """`_risks` by the forecast, of numbers that the limit allows."""
        done, forecast = self.done, self.forecast
        if forecast is None:
            return [1.0 if tokens > self.expected_remaining else 0.0 for tokens in needed]
        passed = forecast.level_of(done)
        if passed >= 1.0:
            # `LengthForecast.remaining`: up to half as much again.
            return [min(1.0, tokens / max(1.0, done / 2)) for tokens in needed]
        left = 1.0 - passed
        levels = forecast.levels_of([done + tokens - 1 for tokens in needed])
        return [(level - passed) / left if level > passed else 0.0 for level in levels]


class WeightedSlo(NamedTuple):
    """The objectives of one request, which are met or missed together; `weight` of its class."""

    weight: float
    objectives: tuple[TimeLeft | MeanPace, ...]

    def added_risk(self, pauses: Sequence[float]) -> list[float] | None:
        """Probability that each pause, in seconds, breaks the SLO; None if no pause adds any."""
        found: list[float] | None = None
        for each in self.objectives:
            if (risks := each.added_risk(pauses)) is not None:
                found = risks if found is None else list(map(max, found, risks))
        return found

    @property
    def least_spare(self) -> float:
        """Seconds to the first fixed deadline that can still be met; infinite if there is none."""
        left = (each.spare for each in self.objectives if isinstance(each, TimeLeft) and each.spare > 0.0)
        return min(left, default=inf)


class PauseCosts:
    """Expected number of SLOs of requests in the engine that a pass breaks, weighted by class.

    A second of a pass is a pause of `pass_delay` seconds: all of it where steps and passes take turns, less
    where they run at the same time.

    When a request that waits for a place gets it is not known. If each part of its spare time were as likely
    as the others to be needed, a pause would break its SLO with the probability pause / spare time. The
    gate admits what it predicts to be in time, so that few starts are as late as that: 0.3 of it.

    Prompts arrive during a pause, too, and are computed after it: a second of a pause delays the requests by
    `stretch` seconds. What a pause costs the requests to come, `to_come` tells (`expected_arrivals`).
    """

    def __init__(
        self,
        running: Iterable[WeightedSlo],
        waiting: Iterable[WeightedSlo] = (),
        stretch: float = 1.0,
        pass_delay: float = 1.0,
        to_come: Callable[[float], float] | None = None,
    ) -> None:
        self._running = list(running)
        self._stretch = stretch
        self._pass_delay = pass_delay
        self._to_come = to_come
        by_spare = sorted((slo.least_spare, slo.weight) for slo in waiting)
        self._spares = [spare for spare, _ in by_spare]
        # Of the first n: their weights, and what each second costs.
        self._weights = [0.0, *accumulate(weight for _, weight in by_spare)]
        self._rates = [0.0, *accumulate(weight / spare for spare, weight in by_spare)]

    def __call__(self, passes: Sequence[float]) -> list[float]:
        """The expected number for passes of these lengths from now on, in seconds, ascending."""
        pauses = [self._stretch * self._pass_delay * seconds for seconds in passes]
        costs = list(map(self._cost_to_waiting, pauses))
        if self._to_come is not None:
            costs = [cost + self._to_come(pause) for cost, pause in zip(costs, pauses, strict=True)]
        # Plain floats: no pause breaks most SLOs, and for the few others numpy takes longer.
        for slo in self._running:
            if (risks := slo.added_risk(pauses)) is not None:
                costs = [cost + slo.weight * risk for cost, risk in zip(costs, risks, strict=True)]
        return costs

    def _cost_to_waiting(self, pause: float) -> float:
        taken = bisect_right(self._spares, pause)
        return self._weights[taken] + _LATE_START_SHARE * pause * (self._rates[-1] - self._rates[taken])


class PendingWork(NamedTuple):
    """One embedding call: weight of its class, time to its deadline (None: no deadline), device time left."""

    weight: float
    time_left: Duration | None
    work: Duration


def call_values(calls: Iterable[PendingWork], until_next: Duration = NO_TIME) -> list[float]:
    """What each call is worth now, in weighted SLOs; `calls` are in the order of computation.

    `until_next` is the time after which a pass can start at the earliest if none starts now.
    """
    needed_share, ahead, in_time = 0.0, 0, []
    weights = []
    for call in calls:
        ahead += call.work
        is_in_time = call.time_left is not None and 0 < call.time_left >= ahead
        if is_in_time and call.time_left:
            needed_share = max(needed_share, min(1.0, ahead / max(1, call.time_left - until_next)))
        weights.append(call.weight)
        in_time.append(is_in_time)
    return [
        weight * max(_NO_SLO_SHARE, needed_share if is_in_time else 0.0)
        for weight, is_in_time in zip(weights, in_time, strict=True)
    ]


class LongestPass:
    """Bounds a pass by the objectives of recent calls, so that a call can wait for the end of one."""

    def __init__(self) -> None:
        self._objectives = deque[Duration](maxlen=_RECENT_CALLS)

    def record(self, objective: Duration | None) -> None:
        """A call arrived that has this time from its arrival to its deadline; None: no deadline."""
        if objective is not None:
            self._objectives.append(objective)

    def inputs(self, most: int, took: Callable[[int], Duration], start: float) -> int:
        """How many of the first `most` inputs one pass may take, at least one.

        Args:
            most: inputs that could be taken.
            took: predicted time of a pass of so many of them; it never falls.
            start: part of that time that does not depend on the inputs, in ns.
        """
        if not self._objectives or most <= 1:
            return most
        longest = max(_PASS_SHARE * min(self._objectives), _LEAST_STARTS * start)
        return max(1, bisect_right(range(1, most + 1), longest, key=took))


def inputs_to_compute(
    values: Sequence[float], took: Callable[[int], Duration], cost: PauseCost | None, idle: Duration
) -> int:
    """How many of the first inputs the next pass takes; 0 if it should not start now.

    Args:
        values: worth of each input, the most urgent first.
        took: predicted time of a pass of so many of the first inputs; it never falls.
        cost: `PauseCosts`; None if no generation runs.
        idle: time since the end of the last pass.
    """
    if cost is None or not values:
        return len(values)
    shortest, worth = to_seconds(took(1)), list(accumulate(values))
    earned = to_seconds(idle) * _FLOOR_SHARE / (1.0 - _FLOOR_SHARE)
    free = min(earned, max(_LONGEST_FREE_SECONDS, shortest))
    if shortest > free and cost([shortest])[0] >= worth[-1]:
        # A longer pass costs no less, so none is worth its cost. Most that wait end here.
        return 0
    sizes = list(_sizes(len(values)))
    passes = [to_seconds(took(size)) for size in sizes]
    net = [
        worth[size - 1] - (0.0 if seconds <= free else price)
        for size, seconds, price in zip(sizes, passes, cost(passes), strict=True)
    ]
    best = max(range(len(net)), key=net.__getitem__)
    return sizes[best] if net[best] > 0.0 else 0


def _sizes(most: int) -> Iterable[int]:
    size = 1
    while size < most:
        yield size
        size += max(1, size // _SIZE_STEP)
    yield most
