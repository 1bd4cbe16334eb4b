"""What would a policy's schedule be in the papers' round model? One engine, two clocks.

A request started in round p holds s + (t - p) cells in rounds t of [p + 1, p + o] and completes at
p + o. Order inside a round: arrivals join (an idle engine jumps to the next one), overflow test and
clearing, admission, one token for everyone in the batch, release of the finished. With a step-time
model a round takes as long as its batch; without one it takes one unit, and arrivals in between join
at the next whole round. Requests stream in and out: memory follows those present, not the trace.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

from backends.cost_models.step_time import StepTime
from benchmark_control_plane.round_model.policies.interface import Candidate, StepPolicy

_FRUITLESS_CLEARINGS = 1000
_FRUITLESS_CLEARINGS_PER_CELL = 10
"""A policy that spares the oldest may need as many as the longest output before someone finishes."""


class NoProgress(RuntimeError):
    """The policy clears again and again and finishes nobody."""


@dataclass(frozen=True, slots=True)
class RoundArrival:
    """`output_tokens` is the true length, which no policy sees."""

    candidate: Candidate
    output_tokens: int


OnFinish = Callable[[RoundArrival, float, float], None]
"""(request, start of its last run, completion)."""


@dataclass(slots=True)
class RoundTotals:
    """`clears` counts rounds in which memory overflowed, `cleared` the requests sent back."""

    rounds: int = 0
    clears: int = 0
    cleared: int = 0
    max_usage: int = 0
    finished: int = 0
    total_latency: float = 0.0
    makespan: float = 0.0


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
    fruitless: int = 0

    def join(self, arrival: RoundArrival) -> None:
        self.present[arrival.candidate.id] = arrival
        self.policy.arrive(arrival.candidate)
        self.fruitless = 0

    def clear(self, excess: int) -> None:
        totals = self.totals
        totals.clears += 1
        for candidate in self.policy.clear(self.step, excess):
            run = self.running.pop(candidate.id)
            self.ending[run.started + run.arrival.output_tokens].remove(run)
            self.used -= candidate.prompt + self.step - run.started
            totals.cleared += 1
        self.fruitless += 1
        if self.fruitless > _FRUITLESS_CLEARINGS + _FRUITLESS_CLEARINGS_PER_CELL * self.memory:
            raise NoProgress(
                f"memory overflowed {self.fruitless} times and nobody finished, up to round {self.step}: "
                "the policy repeats itself; raise alpha or clear by chance (alpha-beta)"
            )

    def begin(self) -> int:
        """Starts whom the policy names; returns their prompt tokens."""
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
            self.clear(excess)
        decodes = len(self.running)
        prefill = self.begin()
        count = len(self.running)
        if not count:
            raise RuntimeError(f"round {self.step}: the policy starts nobody on an idle engine")
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
        self.fruitless = 0
        for run in done:
            candidate = run.arrival.candidate
            del self.running[candidate.id]
            del self.present[candidate.id]
            self.used -= candidate.prompt + run.arrival.output_tokens
            self.policy.finish(candidate, self.step)
            totals.finished += 1
            totals.total_latency += self.now - candidate.arrival
            self.on_finish(run.arrival, run.start, self.now)
        totals.makespan = self.now


def simulate(
    arrivals: Iterable[RoundArrival],
    *,
    memory: int,
    policy: StepPolicy,
    step_time: StepTime | None,
    on_finish: OnFinish,
) -> RoundTotals:
    """Runs until all have finished. `arrivals` come in order of time; each fits the memory alone.

    Raises NeverEnds.
    """
    engine = _RoundEngine(memory, policy, step_time, on_finish)
    coming: Iterator[RoundArrival] = iter(arrivals)
    upcoming = next(coming, None)
    while upcoming is not None or engine.present:
        if not engine.present and upcoming is not None and upcoming.candidate.arrival > engine.now:
            at = upcoming.candidate.arrival
            engine.now = ceil(at) if step_time is None else at
        while upcoming is not None and upcoming.candidate.arrival <= engine.now:
            engine.join(upcoming)
            upcoming = next(coming, None)
        engine.round()
    return engine.totals
