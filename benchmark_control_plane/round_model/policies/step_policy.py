"""The interface of a policy that decides before every step: `StepPolicy`, its options and its candidates.

The host (a round model, the engine, the gate) reports arrivals and completions to a `StepPolicy`; the policy
decides step by step which requests are cleared and which start. Memory is counted in cells: a sequence
started before step p holds prompt + k cells after step p + k - 1, one more in every step, until it finishes.
A policy knows predictions only. Steps count batches, not time, and never decrease.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Protocol

Draw = Callable[[], float]
"""Returns a uniform number in [0, 1) from the host's seeded generator."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request as policies see it.

    `predicted` output tokens are at least 1; `due` is the deadline in the unit of `arrival`, None without
    one.
    """

    id: int
    arrival: float
    prompt: int
    predicted: int
    due: float | None = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of a policy.

    `memory` is in cells; the share `alpha` of it is kept free (alpha-protection), and `beta` is the
    probability of being cleared in an overflow. `step_time` is the duration of a step in the unit of
    `arrival`; a prompt token lengthens the step of its prefill by `prompt_steps` steps.
    """

    memory: int
    alpha: float = 0.0
    beta: float = 0.0
    draw: Draw | None = None
    step_time: float = 1.0
    prompt_steps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(
                f"alpha={self.alpha}: the share of memory kept free must be at least 0 and below 1"
            )

    @property
    def budget(self) -> int:
        """Cells that a plan may use."""
        # In floating point (1 - 0.8) * 10 is less than 2.
        return floor(round((1 - self.alpha) * self.memory, 6))


class StepPolicy(Protocol):
    """Decides which requests are cleared and which start.

    In a step the host calls `arrive` and `finish` for the events, then `evict` if memory would overflow, then
    `start` once.
    """

    def arrive(self, candidate: Candidate) -> None: ...

    def finish(self, candidate: Candidate, step: int) -> None:
        """Reports that `candidate` completed at the end of the step before `step`."""

    def evict(self, step: int, excess: int) -> Sequence[Candidate]:
        """Chooses requests that give back all cells, to free at least `excess` cells in this step.

        The policy puts them into its own queue again; the host does not call `arrive` for them.
        """
        ...

    def start(self, step: int) -> Sequence[Candidate]:
        """Chooses the requests that join the batch of `step`, in order."""
        ...
