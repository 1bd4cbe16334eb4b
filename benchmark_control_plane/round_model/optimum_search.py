"""Searches good schedules without a proof, by simulated annealing on the order of a list schedule.

An order stands for the schedule that places each request, in this order, in the first round from which it
never overflows together with those placed before it. Some order gives an optimal schedule. A move takes one
request to another position; the placements before that position are reused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmark_control_plane.round_model.instance import HindsightInstance, HindsightJob

Stop = Callable[[], bool]

_SHIFTS = [d for d in range(-12, 13) if d]
_MOVES_PER_RESTART = 8_000
_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 0.05, 0.001
"""First and last temperature as shares of the mean completion."""
_TEMPERATURE_FACTORS = (0.5, 1.0, 4.0)


@dataclass(slots=True)
class _ListScheduler:
    """Places requests in order.

    `profiles[i][t]` is the use of round t after i placements, plus t; with it one maximum tests whether a
    start fits.
    """

    instance: HindsightInstance
    order: list[int]
    horizon: int = field(init=False)
    profiles: list[list[int]] = field(init=False)
    sums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        jobs = self.instance.jobs
        self.horizon = max(j.release for j in jobs) + sum(j.output for j in jobs) + 2
        self.profiles = [list(range(self.horizon))]
        self.sums = [0]
        self.rebuild(0)

    def rebuild(self, first: int) -> None:
        """Places the requests from position `first` on again."""
        del self.profiles[first + 1 :], self.sums[first + 1 :]
        for i in self.order[first:]:
            profile = self.profiles[-1].copy()
            end = self._place(profile, self.instance.jobs[i])
            self.profiles.append(profile)
            self.sums.append(self.sums[-1] + end)

    def trial(self, order: Sequence[int], first: int, limit: float) -> int | None:
        """Sum of completions of an order that differs from position `first` on; None if above `limit`."""
        profile = self.profiles[first].copy()
        total = self.sums[first]
        jobs = self.instance.jobs
        left = sum([jobs[i].release + jobs[i].output for i in order[first:]])
        for i in order[first:]:
            job = jobs[i]
            left -= job.release + job.output
            total += self._place(profile, job)
            if total + left > limit:
                return None
        return total

    def starts(self) -> list[int]:
        jobs = self.instance.jobs
        starts = [0] * len(jobs)
        for at, i in enumerate(self.order):
            starts[i] = self.sums[at + 1] - self.sums[at] - jobs[i].output
        return starts

    def _place(self, profile: list[int], job: HindsightJob) -> int:
        """Adds the job at its first feasible start and returns its completion."""
        output, start = job.output, job.release
        room = self.instance.memory - job.prompt
        while True:
            window = profile[start + 1 : start + output + 1]
            highest = max(window)
            if highest <= room + start:
                break
            # A start one round later needs one cell less in every round, and none in rounds before it.
            start = min(start + 1 + window.index(highest), highest - room)
        first = job.prompt + 1
        profile[start + 1 : start + output + 1] = [use + k for k, use in enumerate(window, first)]
        return start + output


def search(
    instance: HindsightInstance, orders: Sequence[Sequence[int]], *, seed: int, stop: Stop
) -> list[int]:
    """Best starts found by annealing from the best of `orders`, restarted until `stop()` is true."""
    random = Random(seed)
    candidates = [_ListScheduler(instance, list(order)) for order in orders]
    best = min(candidates, key=lambda c: c.sums[-1])
    best_order, best_total = list(best.order), best.sums[-1]
    while len(instance.jobs) > 1 and not stop():
        order, total = _anneal(
            _ListScheduler(instance, list(best_order)),
            random,
            stop,
            temperature_factor=random.choice(_TEMPERATURE_FACTORS),
        )
        if total < best_total:
            best_order, best_total = order, total
    return _ListScheduler(instance, best_order).starts()


def _anneal(
    current: _ListScheduler, random: Random, stop: Stop, *, temperature_factor: float
) -> tuple[list[int], int]:
    count = len(current.order)
    total = current.sums[-1]
    best_order, best_total = list(current.order), total
    scale = temperature_factor * total / count
    for move in range(_MOVES_PER_RESTART):
        if move % 64 == 0 and stop():
            break
        temperature = (
            _FIRST_TEMPERATURE
            * (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** (move / _MOVES_PER_RESTART)
            * scale
        )
        source = random.randrange(count)
        target = min(count - 1, max(0, source + random.choice(_SHIFTS)))
        order = list(current.order)
        order.insert(target, order.pop(source))
        # Drawing the acceptance threshold first lets a bad trial end early.
        limit = total + temperature * random.expovariate(1.0)
        first = min(source, target)
        found = current.trial(order, first, limit)
        if found is None:
            continue
        total = found
        current.order = order
        current.rebuild(first)
        if total < best_total:
            best_order, best_total = order, total
    return best_order, best_total


def initial_orders(instance: HindsightInstance) -> list[list[int]]:
    """Initial orders: by output, memory volume, volume per peak, earliest completion, and arrival."""
    jobs = instance.jobs
    indices = range(len(jobs))
    return [
        sorted(indices, key=lambda i: (jobs[i].output, jobs[i].arrival, i)),
        sorted(indices, key=lambda i: (jobs[i].volume, jobs[i].arrival, i)),
        sorted(indices, key=lambda i: (jobs[i].volume / jobs[i].peak, jobs[i].arrival, i)),
        sorted(indices, key=lambda i: (jobs[i].arrival + jobs[i].output, i)),
        sorted(indices, key=lambda i: (jobs[i].arrival, i)),
    ]
