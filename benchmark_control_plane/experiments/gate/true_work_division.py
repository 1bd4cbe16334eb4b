"""Divides the deadline of a workflow by the true work of its stages, which only a simulation knows.

The work of a stage is its time alone on the idle device. The rules are those of Kao and Garcia-Molina,
"Deadline assignment in a distributed soft real-time system" (ICDCS 1993), and fixed shares scaled by the size
of each stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal

from benchmark_control_plane.judge.hindsight.least_work import least_works
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from benchmark_control_plane.judge.workflow_stages import STAGES, StageName, WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest

_LEAST_MS = 1.0


@dataclass(frozen=True, slots=True)
class DividedStage(WorkflowStage):
    """A stage that states `own_ms` and its `part` of the time that `work_ms` leaves of what remains."""

    own_ms: float = 0.0
    work_ms: float = 0.0

    def stated_ms(self, elapsed_ms: float) -> float:
        """End-to-end objective that the request states, sent so long after the start of the workflow."""
        slack = self.deadline_ms - elapsed_ms - self.work_ms
        return max(_LEAST_MS, self.own_ms + self.part * slack)


@dataclass(frozen=True, slots=True)
class TrueWork:
    """A division of what remains, by `rule`.

    - `flexibility`: in proportion to the work of this stage and of the later ones; at least `least` of it.
    - `slack`: its work, and an equal part of what the work of all stages leaves.
    - `effective`: all that remains less `times` the work of the later stages.
    - `shares`: in proportion to `shares`, each scaled by the work of the stage over the mean of all.
    """

    rule: Literal["flexibility", "slack", "effective", "shares"]
    least: float = 0.0
    times: float = 1.0
    shares: Mapping[StageName, float] | None = None

    def divided(
        self, stages: Sequence[WorkflowStage], works: Sequence[float], means: Mapping[str, float]
    ) -> list[WorkflowStage]:
        """The stages of one workflow; `works` are theirs in ms, `means` those of all workflows by stage."""
        return [
            self._divided(stage, works[number:], [means[later.name] for later in stages[number:]])
            for number, stage in enumerate(stages)
        ]

    def _divided(self, stage: WorkflowStage, works: Sequence[float], means: Sequence[float]) -> DividedStage:
        """`works` and `means` begin with those of the stage."""
        plain = DividedStage(stage.workflow, stage.name, stage.deadline_ms)
        if self.rule == "effective":
            return replace(plain, part=1.0, work_ms=self.times * sum(works[1:]))
        if self.rule == "slack":
            return replace(plain, part=1 / len(works), own_ms=works[0], work_ms=sum(works))
        if self.rule == "flexibility":
            return replace(plain, part=max(self.least, works[0] / sum(works)))
        assert self.shares is not None
        to_come = [self.shares[name] for name in STAGES[-len(works) :]]
        scaled = [share * work / usual for share, work, usual in zip(to_come, works, means, strict=True)]
        return replace(plain, part=scaled[0] / sum(scaled))


def divided(
    requests: Sequence[PlannedRequest], device: SimulatedDeviceSection, division: TrueWork
) -> list[PlannedRequest]:
    """What the requests state under a division by true work; those of a workflow are in its order."""
    works = work_ms(requests, device)
    workflows: dict[str, list[PlannedRequest]] = {}
    for request in requests:
        if request.stage is not None:
            workflows.setdefault(request.stage.workflow, []).append(request)
    means = {
        name: mean(works[r.id] for r in requests if r.stage is not None and r.stage.name == name)
        for name in {r.stage.name for r in requests if r.stage is not None}
    }
    stages: dict[str, WorkflowStage] = {}
    for found in workflows.values():
        plain = [r.stage for r in found if r.stage is not None]
        told = division.divided(plain, [works[r.id] for r in found], means)
        stages |= {request.id: stage for request, stage in zip(found, told, strict=True)}
    return [replace(request, stage=stages.get(request.id)) for request in requests]


def work_ms(requests: Sequence[PlannedRequest], device: SimulatedDeviceSection) -> dict[str, float]:
    """Time of each request alone on the idle device in ms, by id."""
    # Requests of the warm-up count, too.
    first = min((request.at for request in requests), default=0.0)
    shifted = [replace(request, at=request.at - first) for request in requests]
    return {work.planned.id: 1e3 * work.alone for work in least_works(shifted, device, {}, drain=0.0)}
