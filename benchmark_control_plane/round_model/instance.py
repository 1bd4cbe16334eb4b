"""What may a schedule with hindsight do? The round model's requests, and whether a schedule keeps its rule.

A request started in round p holds prompt + k cells in round p + k for k = 1 .. output, then is complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from benchmark_control_plane.common.arguments import BadInput, finite, items, whole


@dataclass(frozen=True, slots=True)
class HindsightJob:
    """`release` is the first round that it may start in."""

    arrival: float
    prompt: int
    output: int

    @property
    def release(self) -> int:
        return ceil(self.arrival)

    @property
    def peak(self) -> int:
        return self.prompt + self.output

    @property
    def volume(self) -> int:
        """Cell-rounds from start to completion."""
        return self.prompt * self.output + self.output * (self.output + 1) // 2


@dataclass(frozen=True, slots=True)
class HindsightInstance:
    memory: int
    jobs: tuple[HindsightJob, ...]

    def total_latency(self, start: Sequence[int]) -> float:
        return sum(p + job.output - job.arrival for p, job in zip(start, self.jobs, strict=True))


def read_instance(source: Mapping[str, Any]) -> HindsightInstance:
    """Raises BadInput."""
    memory = whole(source.get("M"), "M", least=1)
    jobs = []
    for i, one in enumerate(items(source, "requests")):
        if not isinstance(one, dict):
            raise BadInput(f"requests[{i}]={one!r}: an object with a, s and o is needed")
        arrival = finite(one.get("a"), f"requests[{i}].a")
        if arrival < 0:
            raise BadInput(f"requests[{i}].a={arrival}: arrivals are at least 0")
        prompt = whole(one.get("s"), f"requests[{i}].s", least=0)
        output = whole(one.get("o"), f"requests[{i}].o", least=1)
        if prompt + output > memory:
            raise BadInput(
                f"requests[{i}]: s + o = {prompt + output} exceeds M={memory}, so it can never run; "
                "raise M or drop the request"
            )
        jobs.append(HindsightJob(arrival, prompt, output))
    return HindsightInstance(memory, tuple(jobs))


def first_violation(instance: HindsightInstance, start: Sequence[int]) -> str | None:
    """The first rule of the round model that the schedule breaks; None if it is feasible."""
    used: dict[int, int] = {}
    for i, (job, p) in enumerate(zip(instance.jobs, start, strict=True)):
        if p < job.arrival:
            return f"request {i} starts in round {p}, before its arrival at {job.arrival}"
        for k in range(1, job.output + 1):
            used[p + k] = used.get(p + k, 0) + job.prompt + k
    over = [t for t, cells in sorted(used.items()) if cells > instance.memory]
    return f"round {over[0]} holds {used[over[0]]} of {instance.memory} cells" if over else None
