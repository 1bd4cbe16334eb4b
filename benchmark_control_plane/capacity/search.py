"""Simulates a workload at increasing rates and finds the highest at which each class keeps its objectives.

Gate and engine policies are those of the server; the device is simulated, in virtual time. No rate is tried
above the one at which even the smallest requests alone are too many. A class without objectives, or with ones
that no wait within the window can break, is capped at the rate at which queues grow without bound: in a short
window a higher one would look sustainable.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

from benchmark_control_plane.capacity.stability import Stability
from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.frontier_search import highest_load
from benchmark_control_plane.judge.open_loop_client import RunResult, open_loop
from benchmark_control_plane.judge.records import RequestRecord, SloTargets, without_warmup
from benchmark_control_plane.judge.simulated_target import simulated_target
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator import virtual_time
from controlplane.core.decision import Outcome

LOADS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Rates tried first, as parts of the highest that any policy could sustain."""
WARM_UP_SHARE = 0.25
"""Requests of the warm-up as a part of those that count."""
_DRAIN_SECONDS = 60.0
_Z95 = 1.96

Say = Callable[[str], None]
Plan = Callable[[float, float, float], Sequence[PlannedRequest]]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated.

    Attributes:
        plan: the requests of the workload at a rate (requests per second), within seconds of warm-up and
            seconds that count; those of the warm-up have negative times.
        device: device and engines.
        sections: sections of the server's YAML, without models.
        objectives: objectives by class.
        requests: requests of one run, the warm-up not counted.
    """

    plan: Plan
    device: SimulatedDeviceSection
    sections: Mapping[str, Any]
    objectives: Mapping[str, SloTargets]
    requests: int

    def at(self, rate: float) -> list[RequestRecord]:
        """Records of a run at `rate` requests per second, without those of the warm-up."""
        measured = self.requests / rate
        warmup = WARM_UP_SHARE * measured
        planned = self.plan(rate, warmup, measured)

        async def play() -> RunResult:
            async with simulated_target(self.device, self.sections, has_gate=True) as target:
                return await open_loop(
                    target, planned, self.objectives,
                    warmup=warmup, drain=_DRAIN_SECONDS, clock=asyncio.get_running_loop().time,
                )  # fmt: skip

        return without_warmup(virtual_time.run(play()).records)


@dataclass(frozen=True, slots=True)
class ClassCapacity:
    """Capacity for one class, or for all together.

    Attributes:
        name: the class; None for all together.
        rate: highest rate of the whole mix at which the class attains the target; None if none was found.
        share: share of the class in the requests.
        error: 95 % sampling error of an attainment near the target, as a share.
        limit: what limits the rate.
    """

    name: str | None
    rate: float | None
    share: float
    error: float
    limit: str


@dataclass(slots=True)
class RateSearch:
    """Attainments by rate and class, simulated on demand."""

    simulated: Simulated
    target: float
    say: Say
    attained: dict[float, dict[str, float]] = field(default_factory=dict)
    records: dict[float, list[RequestRecord]] = field(default_factory=dict)

    def run(self, bound: Stability, *, steps: int) -> list[ClassCapacity]:
        """Searches below `bound`, with `steps` bisections for all classes together."""
        for load in LOADS:
            self._all_at(load * bound.attainable_below)
        overall = self._highest(None, steps)
        each = [self._capacity(name, self._highest(name, 0), bound) for name in self._names()]
        return [self._capacity(None, overall, bound), *each]

    def _names(self) -> list[str]:
        return sorted({r.planned.service_class for run in self.records.values() for r in run})

    def lowest(self, rate: float) -> float:
        """The lowest attainment of any class at a simulated `rate`."""
        return min(self.attained[rate].values(), default=1.0)

    def _attainments(self, name: str | None) -> dict[float, float]:
        """By rate, of a class where it had requests; without a name the lowest."""
        if name is None:
            return {rate: self.lowest(rate) for rate in self.attained}
        return {rate: found[name] for rate, found in self.attained.items() if name in found}

    def _highest(self, name: str | None, steps: int) -> float | None:
        measured = self._attainments(name)
        return highest_load(measured, self.target, steps=steps, attainment_at=self._all_at)

    def _all_at(self, rate: float) -> float:
        """The lowest attainment of any class at `rate`."""
        records = self.simulated.at(rate)
        shares = analysis.class_attainments(records)
        self.attained[rate] = shares
        self.records[rate] = records
        self.say(f"{rate:.3g} requests/s: " + ", ".join(f"{n} {s:.1%}" for n, s in shares.items()))
        return self.lowest(rate)

    def _capacity(self, name: str | None, rate: float | None, bound: Stability) -> ClassCapacity:
        run = self.records[max(self.records)]
        sizes = Counter(r.planned.service_class for r in run)
        # The attainment of all together is that of a class.
        judged = self._worst(max(self.records)) if name is None and sizes else name
        error = _Z95 * sqrt(self.target * (1 - self.target) / max(1, sizes[judged] if judged else 0))
        count = len(run) if name is None else sizes[name]
        missed = [at for at, share in sorted(self._attainments(name).items()) if share < self.target]
        limit = self._cause(name, missed[0]) if missed else f"no policy serves more: {bound.binding}"
        if rate is not None and rate > bound.overloaded_above and self._waits_for_ever(name, rate):
            rate, limit = bound.overloaded_above, f"queues grow above it: {bound.binding}"
        return ClassCapacity(name, rate, count / max(1, len(run)), error, limit)

    def _worst(self, rate: float) -> str:
        """The class that attains least at `rate`."""
        shares = self.attained[rate]
        return min(shares, key=lambda n: (shares[n], n))

    def _waits_for_ever(self, name: str | None, rate: float) -> bool:
        """Whether the class, or any if None, has no objective that a queue growing at `rate` would break.

        A queue breaks no objective for the time between tokens, and none that is longer than the window.
        """
        classes = self._names() if name is None else [name]
        window_ms = 1e3 * (1 + WARM_UP_SHARE) * self.simulated.requests / rate
        stated = (self.simulated.objectives.get(each, SloTargets()) for each in classes)
        return any(min(each.ttft_ms or inf, each.e2e_ms or inf) > window_ms for each in stated)

    def _cause(self, name: str | None, rate: float) -> str:
        """The most frequent cause of the misses at `rate`; without a name of the class that attains least."""
        if name is None:
            name = self._worst(rate)
            return f"{name}: {self._cause(name, rate)}"
        objective = self.simulated.objectives.get(name, SloTargets())
        causes = Counter(
            _miss(record, objective)
            for record in self.records[rate]
            if record.planned.service_class == name and record.outcome is not Outcome.MET
        )
        cause, count = min(causes.items(), key=lambda item: (-item[1], item[0]))
        return f"{cause} ({count / causes.total():.0%} of the misses at {rate:.3g}/s)"


def _miss(record: RequestRecord, objective: SloTargets) -> str:
    """Why a request was not served in time."""
    if record.outcome is Outcome.REJECTED:
        return f"rejected, {record.error}"
    for name, limit in objective.objectives().items():
        value = getattr(record, name)
        if name == "ttft_ms" and value is None:
            value = record.e2e_ms
        if value is not None and value > limit:
            return f"{name.removesuffix('_ms').upper() if name != 'e2e_ms' else 'e2e'} missed"
    return "unfinished when the run ended"


def undersized(capacities: Sequence[ClassCapacity]) -> bool:
    """Whether a class attained the target at no rate."""
    return any(capacity.rate is None for capacity in capacities)
