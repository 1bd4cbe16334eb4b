"""Workflows of the workload: requests that follow each other under one deadline.

The client states an end-to-end objective for each stage (`WorkflowDeadlines`). It sends no stage after the
deadline. A stage is judged by the deadline, from the start of the first stage, so the attainment of the class
of the answers is the share of workflows that kept their deadline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from controlplane.config.fields import STRICT

StageName = Literal["query", "rerank", "answer"]
STAGES: tuple[StageName, ...] = ("query", "rerank", "answer")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class WorkflowStage:
    """Place of a request in a workflow.

    Attributes:
        workflow: id of the workflow.
        name: one of `STAGES`.
        deadline_ms: time from the start of the first stage to the end of the last.
        budget_ms: end-to-end objective that the request states; None for none.
        part: the request states this part of what remains of the deadline instead; 0 for none.
    """

    workflow: str
    name: str
    deadline_ms: float
    budget_ms: float | None = None
    part: float = 0.0

    def stated_ms(self, elapsed_ms: float) -> float | None:
        """End-to-end objective that the request states, sent so long after the start of the workflow."""
        return self.part * (self.deadline_ms - elapsed_ms) if self.part else self.budget_ms


@dataclass(frozen=True)
class WorkflowDeadlines:
    """What the requests of a workflow state of its deadline, by `state`.

    - `budgets`: each stage its share of the deadline.
    - `carried`: each stage its share of what remains, among the shares of the stages to come.
    - `remaining`: each stage all that remains.
    """

    __pydantic_config__: ClassVar = STRICT

    state: Literal["budgets", "carried", "remaining"]
    shares: Mapping[StageName, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.state in ("budgets", "carried")) != bool(self.shares):
            raise ValueError(f"state={self.state!r}: shares go with budgets and carried; add or drop them")
        if self.shares and (min(self.shares.values()) <= 0 or abs(sum(self.shares.values()) - 1) > _ROUNDING):
            raise ValueError(
                f"shares={dict(self.shares)}: the shares of a deadline are above 0 and sum to 1; change them"
            )

    def applied(self, stage: WorkflowStage) -> WorkflowStage:
        """The stage with what its request states."""
        if self.state == "remaining":
            return replace(stage, part=1.0)
        to_come = [share for name in STAGES[STAGES.index(stage.name) :] if (share := self.shares.get(name))]
        if self.state == "carried":
            return replace(stage, part=to_come[0] / sum(to_come))
        return replace(stage, budget_ms=to_come[0] * stage.deadline_ms)
