"""Predicted memory use of the running requests by step, and the first step at which a new request fits.

Use only grows between completions, so checking every step of a new request equals checking the predicted
completions (MC-SF, Online Scheduling for LLM Inference with KV Cache Constraints, eq. 5). For a blocked
request `delay` gives a number of steps within which it cannot fit, so it is not checked again before. A
sequence past its predicted completion is assumed to need one more token at each step (the clamp).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.round_model.policies.step_policy import Candidate

Cells = npt.NDArray[np.int64]

_FIRST_STEPS = 1024


@dataclass(slots=True)
class _RunningJob:
    prompt: int
    started: int
    ends: int
    is_overdue: bool = False


@dataclass(slots=True)
class Horizon:
    """Table of predicted use: `_use[i]` cells in step `_base + i`, without sequences past their prediction.

    `budget` is in cells. `releases` counts how often use became lower than predicted; while it is unchanged,
    a `delay` computed before remains valid.
    """

    budget: int
    releases: int = 0
    _base: int = 0
    _use: Cells = field(default_factory=lambda: np.zeros(_FIRST_STEPS, np.int64))
    _ramp: Cells = field(default_factory=lambda: np.arange(_FIRST_STEPS))
    _jobs: dict[int, _RunningJob] = field(default_factory=dict)
    _ending: dict[int, list[int]] = field(default_factory=dict)
    _seen: int = -1
    _last: int = 0
    _overdue: int = 0
    _overdue_offset: int = 0
    _exclusive: int | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def advance(self, step: int) -> None:
        """Marks sequences past their predicted completion; call it once before each step."""
        ended = (step,) if step == self._seen + 1 else [at for at in self._ending if at <= step]
        for at in ended:
            for request_id in self._ending.pop(at, ()):
                job = self._jobs.get(request_id)
                if job is not None and job.ends == at and not job.is_overdue:
                    job.is_overdue = True
                    self._overdue += 1
                    self._overdue_offset += job.prompt - job.started
        self._seen = step

    def delay(self, candidate: Candidate, step: int) -> int:
        """Steps for which the candidate certainly cannot start; 0 if it fits now."""
        if self._exclusive is not None:
            return 1
        stay = self.stay_steps(candidate)
        first = self._index(step, stay)
        over = self._use[first : first + stay] + self._ramped(candidate.prompt + 1, stay)
        if self._overdue:
            over[0] += self._overdue_cells(step)
        over -= self.budget
        # At step p + k the excess shrinks by one per step of delay, and is gone after k steps.
        return max(0, int(np.minimum(over, self._ramped(1, stay), out=over).max()))

    def headroom(self, step: int, stay: int) -> Cells:
        """Largest prompt that fits now for 1, 2, ... `stay` steps in the batch; negative if none fits."""
        first = self._index(step, stay)
        room: Cells = (self.budget if self._exclusive is None else -1) - self._use[first : first + stay]
        room -= self._ramped(1, stay)
        if self._overdue:
            room[0] -= self._overdue_cells(step)
        return np.minimum.accumulate(room, out=room)

    def levels(self, step: int) -> list[int]:
        """Entry i: predicted use after batch `step + i`, plus i; the last entry is the last completion.

        A new request uses one cell less for each step that it starts later, so levels compare directly. While
        a request runs exclusively, every level is above the budget.
        """
        count = max(self._last - step, 1)
        first = self._index(step, count)
        levels = self._use[first : first + count] + self._ramped(0, count)
        if self._overdue:
            levels[0] += self._overdue_cells(step)
        if self._exclusive is not None:
            levels = self._ramped(self.budget + 1, count)
        listed: list[int] = levels.tolist()
        return listed

    def add(self, candidate: Candidate, step: int, *, exclusive: bool = False) -> None:
        """Adds a started request; `exclusive` marks one over the budget by itself, so no other may join."""
        steps = self.stay_steps(candidate)
        first = self._index(step, steps)
        self._use[first : first + steps] += self._ramped(candidate.prompt + 1, steps)
        self._jobs[candidate.id] = _RunningJob(candidate.prompt, step, step + steps)
        self._ending.setdefault(step + steps, []).append(candidate.id)
        self._last = max(self._last, step + steps)
        if exclusive:
            self._exclusive = candidate.id

    def remove(self, candidate: Candidate, step: int) -> None:
        """Removes a request that left before `step`, at its predicted completion or not."""
        job = self._jobs.pop(candidate.id)
        if candidate.id == self._exclusive:
            self._exclusive = None
            self.releases += 1
        if job.is_overdue:
            self._overdue -= 1
            self._overdue_offset -= job.prompt - job.started
            self.releases += 1
        elif step < job.ends:
            left = job.ends - step
            first = self._index(step, left)
            self._use[first : first + left] -= self._ramped(job.prompt + 1 + step - job.started, left)
            self.releases += 1

    def stay_steps(self, candidate: Candidate) -> int:
        """Predicted steps in the batch, at most what the budget could hold, which bounds the table."""
        return min(candidate.predicted, max(1, self.budget - candidate.prompt + 1))

    def _overdue_cells(self, step: int) -> int:
        return self._overdue_offset + self._overdue * (step + 1)

    def _ramped(self, first: int, steps: int) -> Cells:
        if first + steps > len(self._ramp):
            self._ramp = np.arange(2 * (first + steps))
        return self._ramp[first : first + steps]

    def _index(self, step: int, stay: int) -> int:
        """Index of the batch of `step`; grows the table to at least `stay` entries from there on."""
        first = step - self._base
        size = len(self._use)
        if first + stay > size:
            kept = self._use[first:].copy()
            if 2 * (len(kept) + stay) > size:
                self._use = np.zeros(2 * size + 2 * stay, np.int64)
            else:
                self._use[:] = 0
            self._use[: len(kept)] = kept
            self._base = step
            first = 0
        return first
