"""Instances of the hindsight problem, and the check that a schedule is feasible in the round model.

A request started in round p holds prompt + k cells in round p + k for k = 1 .. output, then is complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, finite, integer, items


@dataclass(frozen=True, slots=True)
class HindsightJob:
    """One request of known length; `release` is the first round in which it may start."""

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
    """Memory in cells, and all requests with their lengths."""

    memory: int
    jobs: tuple[HindsightJob, ...]

    def total_latency(self, start: Sequence[int]) -> float:
        """Sum of completion minus arrival, in rounds; `start` is indexed like `jobs`."""
        return sum(p + job.output - job.arrival for p, job in zip(start, self.jobs, strict=True))


def read_instance(source: Mapping[str, Any]) -> HindsightInstance:
    """Parses {"M", "requests": [{"a", "s", "o"}]}. Raises BadInput on a malformed request or one over `M`."""
    memory = integer(source.get("M"), "M", least=1)
    jobs = []
    for i, entry in enumerate(items(source, "requests")):
        if not isinstance(entry, dict):
            raise BadInput(f"requests[{i}]={entry!r}: must be an object with a, s and o")
        arrival = finite(entry.get("a"), f"requests[{i}].a")
        if arrival < 0:
            raise BadInput(f"requests[{i}].a={arrival}: an arrival must be at least 0")
        prompt = integer(entry.get("s"), f"requests[{i}].s", least=0)
        output = integer(entry.get("o"), f"requests[{i}].o", least=1)
        if prompt + output > memory:
            raise BadInput(
                f"requests[{i}]: s + o = {prompt + output} exceeds M={memory}, so it can never run; "
                "raise M or drop the request"
            )
        jobs.append(HindsightJob(arrival, prompt, output))
    return HindsightInstance(memory, tuple(jobs))
