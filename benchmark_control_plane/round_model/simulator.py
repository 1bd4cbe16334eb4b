"""Simulates one engine in the round model of the MC-SF paper, in rounds or in seconds.

A request started in round p holds s + (t - p) cells in rounds t of [p + 1, p + o] and completes at p + o.
Order of events in a round: arrivals join (an idle engine jumps to the next arrival), overflow check and
clearing, admission, one token for every running request, release of completed requests. With a step-time
model a round takes as long as its batch; without one it takes one unit, and requests that arrive within a
round join at the next one. Requests are streamed: memory use of the simulation depends on the requests
present, not on the length of the trace.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

from backends.cost_models.step_time import StepTime
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepPolicy

_MAX_CLEARS = 1000
_MAX_CLEARS_PER_CELL = 10
"""A policy that never clears the oldest may clear once per output token before a request completes."""


class NoProgress(RuntimeError):
    """The policy clears repeatedly and no request completes."""


@dataclass(frozen=True, slots=True)
class RoundArrival:
    """A request of the simulation; policies see `candidate`, never the true length `output_tokens`."""

    candidate: Candidate
    output_tokens: int


OnFinish = Callable[[RoundArrival, float, float], None]
"""Called with (request, start of its last run, completion), in rounds or seconds."""


@dataclass(slots=True)
class RoundTotals:
    """Counters of one run: `clears` counts rounds with an overflow, `cleared` requests sent back."""

    rounds: int = 0
    clears: int = 0
    cleared: int = 0
    max_usage: int = 0
    finished: int = 0
    total_latency: float = 0.0


@dataclass(slots=True)
class _Run:
    arrival: RoundArrival
    started: int
    start: float


@dataclass(slots=True)
class _RoundEngine:
    memory: int
    policy: StepPolicy
    step_time: StepTime | None
    on_finish: OnFinish
    totals: RoundTotals = field(default_factory=RoundTotals)
    present: dict[int, RoundArrival] = field(default_factory=dict)
    running: dict[int, _Run] = field(default_factory=dict)
    ending: dict[int, list[_Run]] = field(default_factory=dict)
    step: int = 0
    now: float = 0
    used: int = 0
    stalled_clears: int = 0

    def join(self, arrival: RoundArrival) -> None:
        self.present[arrival.candidate.id] = arrival
        self.policy.arrive(arrival.candidate)
        self.stalled_clears = 0

    def evict(self, excess: int) -> None:
        totals = self.totals
        totals.clears += 1
        for candidate in self.policy.evict(self.step, excess):
            run = self.running.pop(candidate.id)
            self.ending[run.started + run.arrival.output_tokens].remove(run)
            self.used -= candidate.prompt + self.step - run.started
            totals.cleared += 1
        self.stalled_clears += 1
        if self.stalled_clears > _MAX_CLEARS + _MAX_CLEARS_PER_CELL * self.memory:
            raise NoProgress(
                f"memory overflowed {self.stalled_clears} times and no request finished, "
                f"up to round {self.step}: the policy makes no progress; "
                "raise alpha or clear at random (alpha-beta)"
            )

    def begin(self) -> int:
        """Starts the requests that the policy chooses and returns the sum of their prompt tokens."""
        prefill = 0
        for candidate in self.policy.start(self.step):
            run = _Run(self.present[candidate.id], self.step, self.now)
            self.running[candidate.id] = run
            ends = self.step + run.arrival.output_tokens
            if ends in self.ending:
                self.ending[ends].append(run)
            else:
                self.ending[ends] = [run]
            prefill += candidate.prompt
        return prefill

    def round(self) -> None:
        excess = self.used + len(self.running) - self.memory
        if excess > 0:
            self.evict(excess)
        decodes = len(self.running)
        prefill = self.begin()
        count = len(self.running)
        if not count:
            raise RuntimeError(f"round {self.step}: the policy starts no request on an idle engine")
        held = self.used
        self.used += prefill + count
        self.step += 1
        totals = self.totals
        totals.rounds += 1
        if self.used > totals.max_usage:
            totals.max_usage = self.used
        self.now += 1 if self.step_time is None else self.step_time(prefill, decodes, held)
        done = self.ending.pop(self.step, None)
        if done:
            self.release(done)

    def release(self, done: list[_Run]) -> None:
        totals = self.totals
        self.stalled_clears = 0
        for run in done:
            candidate = run.arrival.candidate
            del self.running[candidate.id]
            del self.present[candidate.id]
            self.used -= candidate.prompt + run.arrival.output_tokens
            self.policy.finish(candidate, self.step)
            totals.finished += 1
            totals.total_latency += self.now - candidate.arrival
            self.on_finish(run.arrival, run.start, self.now)


def simulate(
    arrivals: Iterable[RoundArrival],
    *,
    memory: int,
    policy: StepPolicy,
    step_time: StepTime | None,
    on_finish: OnFinish,
) -> RoundTotals:
    """Runs until all requests have completed.

    Args:
        arrivals: in order of time; each fits the memory alone.
        memory: cells.
        policy: decides which requests are cleared and started.
        step_time: duration of a round in seconds; None counts rounds.
        on_finish: called for each completion.

    Raises NoProgress if the policy clears repeatedly and no request completes.
    """
    engine = _RoundEngine(memory, policy, step_time, on_finish)
    remaining: Iterator[RoundArrival] = iter(arrivals)
    upcoming = next(remaining, None)
    while upcoming is not None or engine.present:
        if not engine.present and upcoming is not None and upcoming.candidate.arrival > engine.now:
            at = upcoming.candidate.arrival
            engine.now = ceil(at) if step_time is None else at
        while upcoming is not None and upcoming.candidate.arrival <= engine.now:
            engine.join(upcoming)
            upcoming = next(remaining, None)
        engine.round()
    return engine.totals
