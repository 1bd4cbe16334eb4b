"""What does a policy that decides before every step see, and what may it answer?

The host (a round model, the engine, the gate) tells a `StepPolicy` who arrived and who finished; the
policy answers, step by step, who is cleared and who starts. Memory is counted in cells: a sequence
started before step p holds prompt + k cells in step p + k - 1's result, one more every step, until it
finishes. A policy knows predictions only. Steps count batches, not time, and never go back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Protocol

Draw = Callable[[], float]
"""A uniform number in [0, 1), from the host's seeded source."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`predicted` output tokens, at least 1; `due` in the unit of `arrival`, None if nothing is promised."""

    id: int
    arrival: float
    prompt: int
    predicted: int
    due: float | None = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """`alpha` of the memory is kept free as protection; `beta` is the chance of being cleared in an
    overflow. `step_time` is a step in the unit of `arrival`; a prompt token lengthens the step in which
    it is read by `prompt_steps` steps."""

    memory: int
    alpha: float = 0.0
    beta: float = 0.0
    draw: Draw | None = None
    step_time: float = 1.0
    prompt_steps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha}: the protected share of memory is at least 0 and below 1")

    @property
    def budget(self) -> int:
        """Cells that may be planned for."""
        return floor((1 - self.alpha) * self.memory)


class StepPolicy(Protocol):
    """In a step the host calls `arrive` and `finish` as things happen, then `clear` if memory would
    overflow, then `start` once."""

    def arrive(self, candidate: Candidate) -> None: ...

    def finish(self, candidate: Candidate, step: int) -> None:
        """It left at the end of the step before `step`."""

    def clear(self, step: int, excess: int) -> Sequence[Candidate]:
        """Who gives back all cells and waits again, to free at least `excess` cells in this step.

        They wait in the policy already: the host does not call `arrive` again.
        """
        ...

    def start(self, step: int) -> Sequence[Candidate]:
        """Who joins the batch of `step`, in order."""
        ...
