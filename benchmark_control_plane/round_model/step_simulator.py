"""Who meets the objectives when a policy decides before every engine step? Below the gate, without asyncio.

Rule: the simulated engine steps as it does under the live gate; before each step a `StepRule` says who of
those that wait may join, in order, and may reorder those that run: the last is preempted first. Attainment
is counted twice: as published (time to first token, and the 99th percentile of the gaps between a request's
tokens) and strictly (no gap above the limit), as the percentile forgives one endless pause in 100 tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backends.cost_models.step_time import BatchTime, StepLoad
from backends.simulated.scheduler import Sequence as EngineSequence
from backends.simulated.scheduler import SimulatedScheduler

_EMPTY_STEPS = 100
"""A rule may look at some of those that wait only now and then; an engine asks again at once."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """Seconds to the first token and between tokens."""

    ttft: float
    gap: float


@dataclass(eq=False, slots=True)
class SteppedRequest(EngineSequence):
    """`predicted` output tokens are all that a rule may know of `output`."""

    number: int = 0
    arrival: float = 0.0
    predicted: int = 1
    first: float | None = None
    last: float | None = None
    longest_gap: float = 0.0
    gaps: list[float] = field(default_factory=list)
    is_finished: bool = False

    def stamp(self, now: float) -> None:
        if self.last is None:
            self.first = now
        else:
            gap = now - self.last
            self.gaps.append(gap)
            if gap > self.longest_gap:
                self.longest_gap = gap
        self.last = now

    def has_missed(self, now: float, objective: StepObjective) -> bool:
        """Whether the strict objective is broken by now."""
        if self.first is None or self.last is None:
            return now > self.arrival + objective.ttft
        is_late = self.first - self.arrival > objective.ttft or self.longest_gap > objective.gap
        return is_late or now - self.last > objective.gap

    def meets(self, objective: StepObjective, *, strictly: bool) -> bool:
        if not self.is_finished or self.first is None or self.first - self.arrival > objective.ttft:
            return False
        if strictly or self.longest_gap <= objective.gap:
            return self.longest_gap <= objective.gap
        return float(np.percentile(self.gaps, 99)) <= objective.gap


class StepRule(Protocol):
    """Offers requests by putting them into `engine.waiting`, and may take back what has not joined."""

    def arrive(self, one: SteppedRequest) -> None: ...

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        """Before each step."""

    def finish(self, one: SteppedRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine's sizes and speed."""

    blocks: int
    block_tokens: int
    batch_time: BatchTime
    max_running: int = 256
    step_tokens: int = 2_048

    def engine(self) -> SimulatedScheduler[SteppedRequest]:
        return SimulatedScheduler(
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            max_running=self.max_running,
            step_tokens=self.step_tokens,
        )


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of the counted requests, and preemptions a request."""

    published: float
    strict: float
    ttft: float
    preemptions: float


def serve(requests: Iterable[SteppedRequest], rule: StepRule, pool: EngineSetup) -> None:
    """Runs until all have finished; stamps them. Requests come in order of arrival."""
    engine = pool.engine()
    coming = iter(requests)
    upcoming = next(coming, None)
    present = idle = 0
    now = 0.0
    while upcoming is not None or present:
        while upcoming is not None and upcoming.arrival <= now:
            rule.arrive(upcoming)
            present += 1
            upcoming = next(coming, None)
        rule.arrange(engine, now)
        load = StepLoad()
        if not engine.plan(load):
            idle += 1
            if present and idle > _EMPTY_STEPS:
                raise RuntimeError(f"at {now:g} s nobody runs and {present} wait: the rule offers nobody")
            if upcoming is not None and not present:
                now = upcoming.arrival
            continue
        idle = 0
        now += pool.batch_time(load)
        for one in engine.complete():
            one.stamp(now)
            if one.is_gone:
                one.is_finished = True
                present -= 1
                rule.finish(one)


def measure_attainment(counted: Sequence[SteppedRequest], objective: StepObjective) -> Attainment:
    count = len(counted)
    on_time = sum(one.first is not None and one.first - one.arrival <= objective.ttft for one in counted)
    return Attainment(
        published=sum(one.meets(objective, strictly=False) for one in counted) / count,
        strict=sum(one.meets(objective, strictly=True) for one in counted) / count,
        ttft=on_time / count,
        preemptions=sum(one.preemptions for one in counted) / count,
    )
