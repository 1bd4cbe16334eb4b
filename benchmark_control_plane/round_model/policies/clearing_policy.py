"""Bases of the policies whose cleared requests wait again; some of them predict the memory use."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from benchmark_control_plane.round_model.policies.horizon import Horizon
from benchmark_control_plane.round_model.policies.overflow import OverflowClearing
from benchmark_control_plane.round_model.policies.step_policy import Candidate, StepOptions


class ClearingPolicy(ABC):
    """A `StepPolicy` that clears by `overflow`; what starts is up to the subclass."""

    def __init__(self, options: StepOptions, overflow: OverflowClearing) -> None:
        self._options = options
        self._overflow = overflow

    def arrive(self, candidate: Candidate) -> None:
        self._overflow.arrived()
        self._wait(candidate)

    def finish(self, candidate: Candidate, step: int) -> None:
        self._overflow.finished(candidate)
        self._release(candidate, step)

    def evict(self, step: int, excess: int) -> Sequence[Candidate]:
        cleared = self._overflow.cleared(step, excess)
        for candidate in cleared:
            self._release(candidate, step)
            self._wait(candidate)
        return cleared

    @abstractmethod
    def start(self, step: int) -> Sequence[Candidate]: ...

    @abstractmethod
    def _wait(self, candidate: Candidate) -> None:
        """Puts a request into the queue."""

    @abstractmethod
    def _release(self, candidate: Candidate, step: int) -> None:
        """Forgets what the policy keeps of a running request."""


class HorizonPolicy(ClearingPolicy):
    """A policy that predicts the memory use of the running requests."""

    def __init__(self, options: StepOptions, overflow: OverflowClearing) -> None:
        super().__init__(options, overflow)
        self._horizon = Horizon(options.budget)

    def _release(self, candidate: Candidate, step: int) -> None:
        self._horizon.remove(candidate, step)
