"""Simulates an engine whose order is decided before every step, below the gate and without asyncio.

The engine steps as it does under the live gate. Before each step a `StepRule` offers waiting requests in
order and may reorder the running ones; the last running request is preempted first. Attainment is computed in
two metrics: the published one (TTFT, and the 99th percentile of the times between a request's tokens) and a
strict one (no time between tokens above the limit), since the percentile ignores one arbitrarily long pause
in 100 tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backends.cost_models.step_time import BatchTime, StepLoad
from backends.simulated.continuous_batching import SimulatedScheduler
from backends.simulated.continuous_batching import SimulatedSequence as EngineSequence

_MAX_EMPTY_STEPS = 100
"""A rule may look at some waiting requests only every few steps; the engine asks again at once."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """SLO in seconds: `ttft` to the first token, `gap` between two tokens."""

    ttft: float
    gap: float


@dataclass(eq=False, slots=True)
class SteppedRequest(EngineSequence):
    """A request in the simulated engine; a rule may read `predicted` output tokens, but not `output`."""

    number: int = 0
    arrival: float = 0.0
    predicted: int = 1
    first: float | None = None
    last: float | None = None
    longest_gap: float = 0.0
    gaps: list[float] = field(default_factory=list)
    is_finished: bool = False

    def stamp(self, now: float) -> None:
        """Records a token produced at `now`, in seconds."""
        if self.last is None:
            self.first = now
        else:
            gap = now - self.last
            self.gaps.append(gap)
            if gap > self.longest_gap:
                self.longest_gap = gap
        self.last = now

    def has_missed(self, now: float, objective: StepObjective) -> bool:
        """Whether the strict objective is missed at time `now`, in seconds."""
        if self.first is None or self.last is None:
            return now > self.arrival + objective.ttft
        is_late = self.first - self.arrival > objective.ttft or self.longest_gap > objective.gap
        return is_late or now - self.last > objective.gap

    def meets(self, objective: StepObjective, *, strictly: bool) -> bool:
        """Whether the finished request met the objective, by the strict or the published metric."""
        if not self.is_finished or self.first is None or self.first - self.arrival > objective.ttft:
            return False
        if strictly or self.longest_gap <= objective.gap:
            return self.longest_gap <= objective.gap
        return float(np.percentile(self.gaps, 99)) <= objective.gap


class StepRule(Protocol):
    """Decides the order before every step.

    A rule offers requests by putting them into `engine.waiting` and may withdraw those that have not joined
    the batch.
    """

    def arrive(self, request: SteppedRequest) -> None: ...

    def arrange(self, engine: SimulatedScheduler[SteppedRequest], now: float) -> None:
        """Called before each step, at `now` in seconds."""

    def finish(self, request: SteppedRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Sizes and speed of the simulated engine."""

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
    """Shares of the counted requests that meet the SLO in each metric, and preemptions per request."""

    published: float
    strict: float
    ttft: float
    preemptions: float


def serve(requests: Iterable[SteppedRequest], rule: StepRule, setup: EngineSetup) -> None:
    """Runs until all requests have finished and records their token times.

    `requests` must be in order of arrival. Raises RuntimeError if the rule stops offering waiting requests.
    """
    engine = setup.engine()
    remaining = iter(requests)
    upcoming = next(remaining, None)
    present = idle = 0
    now = 0.0
    while upcoming is not None or present:
        while upcoming is not None and upcoming.arrival <= now:
            rule.arrive(upcoming)
            present += 1
            upcoming = next(remaining, None)
        rule.arrange(engine, now)
        load = StepLoad()
        if not engine.plan(load):
            idle += 1
            if present and idle > _MAX_EMPTY_STEPS:
                raise RuntimeError(f"at {now:g} s no request runs and {present} wait: the rule offers none")
            if upcoming is not None and not present:
                now = upcoming.arrival
            continue
        idle = 0
        now += setup.batch_time(load)
        for request in engine.complete():
            request.stamp(now)
            if request.is_removed:
                request.is_finished = True
                present -= 1
                rule.finish(request)


def measure_attainment(counted: Sequence[SteppedRequest], objective: StepObjective) -> Attainment:
    """Attainment of the finished requests in `counted`, which must not be empty."""
    count = len(counted)
    on_time = sum(
        request.first is not None and request.first - request.arrival <= objective.ttft for request in counted
    )
    return Attainment(
        published=sum(request.meets(objective, strictly=False) for request in counted) / count,
        strict=sum(request.meets(objective, strictly=True) for request in counted) / count,
        ttft=on_time / count,
        preemptions=sum(request.preemptions for request in counted) / count,
    )
