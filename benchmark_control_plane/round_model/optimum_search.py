"""How good a schedule can be found without a proof? Annealing on the order of a list schedule.

An order stands for the schedule that starts each request, in turn, in the first round in which it never
overflows beside those placed before it. Some order gives an optimal schedule. A move takes one
request to another place in the order; what comes before is kept, not placed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmark_control_plane.round_model.instance import HindsightInstance, HindsightJob

Stop = Callable[[], bool]

_NEAR = [d for d in range(-12, 13) if d]
_MOVES_PER_RESTART = 8_000
_WARM, _COLD = 0.05, 0.001
"""Temperatures as shares of the mean completion."""
_WARMTHS = (0.5, 1.0, 4.0)


@dataclass(slots=True)
class _ListScheduler:
    """`profile[t]` is the use of round t, plus t: with it one maximum answers whether a start fits."""

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
        """Places all from position `first` on again."""
        del self.profiles[first + 1 :], self.sums[first + 1 :]
        for i in self.order[first:]:
            profile = self.profiles[-1].copy()
            end = self._place(profile, self.instance.jobs[i])
            self.profiles.append(profile)
            self.sums.append(self.sums[-1] + end)

    def trial(self, order: Sequence[int], first: int, limit: float) -> int | None:
        """Sum of completions of an order that differs from position `first` on; None once above `limit`."""
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
        """Adds the job at its first fitting start; its completion."""
        output, start = job.output, job.release
        room = self.instance.memory - job.prompt
        while True:
            window = profile[start + 1 : start + output + 1]
            highest = max(window)
            if highest <= room + start:
                break
            # Starting one round later lowers the need in a round by one; from that round on it is free of it.
            start = min(start + 1 + window.index(highest), highest - room)
        first = job.prompt + 1
        profile[start + 1 : start + output + 1] = [use + k for k, use in enumerate(window, first)]
        return start + output


def search(
    instance: HindsightInstance, orders: Sequence[Sequence[int]], *, seed: int, stop: Stop
) -> list[int]:
    """Best starts found from the given first orders, restarted from the best until `stop`."""
    random = Random(seed)
    candidates = [_ListScheduler(instance, list(order)) for order in orders]
    best = min(candidates, key=lambda c: c.sums[-1])
    best_order, best_total = list(best.order), best.sums[-1]
    while len(instance.jobs) > 1 and not stop():
        order, total = _anneal(
            _ListScheduler(instance, list(best_order)), random, stop, warmth=random.choice(_WARMTHS)
        )
        if total < best_total:
            best_order, best_total = order, total
    return _ListScheduler(instance, best_order).starts()


def _anneal(current: _ListScheduler, random: Random, stop: Stop, *, warmth: float) -> tuple[list[int], int]:
    count = len(current.order)
    total = current.sums[-1]
    best_order, best_total = list(current.order), total
    scale = warmth * total / count
    for move in range(_MOVES_PER_RESTART):
        if move % 64 == 0 and stop():
            break
        heat = _WARM * (_COLD / _WARM) ** (move / _MOVES_PER_RESTART) * scale
        taken = random.randrange(count)
        put = min(count - 1, max(0, taken + random.choice(_NEAR)))
        order = list(current.order)
        order.insert(put, order.pop(taken))
        # The acceptance draw comes first, so that a hopeless trial ends early.
        limit = total + heat * random.expovariate(1.0)
        first = min(taken, put)
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
    """By output, memory volume, volume a cell of peak, earliest completion, and arrival."""
    jobs = instance.jobs
    everyone = range(len(jobs))
    return [
        sorted(everyone, key=lambda i: (jobs[i].output, jobs[i].arrival, i)),
        sorted(everyone, key=lambda i: (jobs[i].volume, jobs[i].arrival, i)),
        sorted(everyone, key=lambda i: (jobs[i].volume / jobs[i].peak, jobs[i].arrival, i)),
        sorted(everyone, key=lambda i: (jobs[i].arrival + jobs[i].output, i)),
        sorted(everyone, key=lambda i: (jobs[i].arrival, i)),
    ]
