"""When will the first token come? What is ahead in the engine at the present pace, times how wrong that was.

Rule: the estimate is the work before the first token: prompts that are not read yet, the own one last,
and the steps until a slot is free. It is stated times quantiles of the last ratios of truth to estimate,
apart for those that find a slot and those that wait for one; the 0.9 quantile is moved by what happens
(see `conformal`), so that it holds.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapreplace
from math import exp, log

import numpy as np

from controlplane.core.clock import Duration, scaled
from controlplane.core.view import Pace

_WINDOW = 96
_MIN_RATIOS = 10
_STEP = 0.06
_MAX_OFFSET = 2.0
_UPPER = 0.9
_NO_DELAY = Duration(0)
_MIN_NANOSECONDS = 1_000.0
"""Nanoseconds: estimates and truths below it are taken as it."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What an engine does before a request's first token: it reads prompts, and before that the request may
    wait for a slot, or for its turn where the engine says how long."""

    prompt_tokens: int
    steps_until_slot: float = 0.0
    turn: Duration = _NO_DELAY

    def work(self, pace: Pace) -> Duration:
        reading = pace.step + scaled(pace.per_prompt_token, self.prompt_tokens)
        return Duration(self.turn + reading + scaled(pace.step, self.steps_until_slot))

    @property
    def waits(self) -> bool:
        return self.steps_until_slot > 0.0 or self.turn > 0


def steps_until_slot(running: Iterable[float], waiting: Iterable[float], slots: int) -> float:
    """Until one comes free behind those that wait, in their order; each is told by its steps to go."""
    ends = sorted(running)[-slots:]
    ends = [0.0] * (slots - len(ends)) + ends
    for steps in waiting:
        heapreplace(ends, ends[0] + steps)
    return ends[0]


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """From now on; as likely sooner as later than `median`."""

    median: Duration
    upper: Duration


@dataclass(slots=True)
class _Ratios:
    """Logarithms of truth over estimate."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    offset: float = 0.0

    def at(self, level: float) -> float:
        return float(np.quantile(self.seen, level)) if len(self.seen) >= _MIN_RATIOS else 0.0

    def upper(self) -> float:
        return self.at(_UPPER) + self.offset


class TtftModel:
    def __init__(self) -> None:
        self._ratios = {False: _Ratios(), True: _Ratios()}

    def predict(self, ahead: Ahead, pace: Pace) -> TtftForecast:
        work, ratios = max(_MIN_NANOSECONDS, ahead.work(pace)), self._ratios[ahead.waits]
        return TtftForecast(_duration(work * exp(ratios.at(0.5))), _duration(work * exp(ratios.upper())))

    def observe(self, ahead: Ahead, pace: Pace, said: TtftForecast, took: Duration) -> None:
        """`pace` and `said` as they were when the request was sent to the engine."""
        ratios = self._ratios[ahead.waits]
        was_covered = took <= said.upper
        moved = ratios.offset + _STEP * (_UPPER - was_covered)
        ratios.offset = min(max(moved, -_MAX_OFFSET), _MAX_OFFSET)
        ratios.seen.append(log(max(_MIN_NANOSECONDS, took) / max(_MIN_NANOSECONDS, ahead.work(pace))))


def _duration(nanoseconds: float) -> Duration:
    return Duration(round(nanoseconds))
