"""When does a newcomer fit beside the predicted use of all that run? Use is kept by absolute step.

Use only grows between completions, so checking every step of a newcomer's stay equals checking the
predicted completions (MC-SF, Online Scheduling for LLM Inference with KV Cache Constraints, eq. 5).
A blocked newcomer learns how many steps cannot help, so it is not asked again before. A sequence past
its predicted completion is taken to need one more token at each step (the clamp).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.round_model.policies.interface import Candidate

Cells = npt.NDArray[np.int64]

_FIRST_STEPS = 1024


@dataclass(slots=True)
class _RunningJob:
    prompt: int
    started: int
    ends: int
    is_late: bool = False


@dataclass(slots=True)
class Horizon:
    """`use[i]` cells are predicted in step `base + i`; late sequences are kept beside it. `releases`
    counts how often use turned out lower than predicted: until it moves, a `delay` stays true."""

    budget: int
    releases: int = 0
    _base: int = 0
    _use: Cells = field(default_factory=lambda: np.zeros(_FIRST_STEPS, np.int64))
    _ramp: Cells = field(default_factory=lambda: np.arange(_FIRST_STEPS))
    _stays: dict[int, _RunningJob] = field(default_factory=dict)
    _ending: dict[int, list[int]] = field(default_factory=dict)
    _seen: int = -1
    _last: int = 0
    _late: int = 0
    _late_offset: int = 0
    _alone: int | None = None

    def __len__(self) -> int:
        return len(self._stays)

    def advance(self, step: int) -> None:
        """Call before each step's questions: finds those that outlived their prediction."""
        ended = (step,) if step == self._seen + 1 else [at for at in self._ending if at <= step]
        for at in ended:
            for request_id in self._ending.pop(at, ()):
                stay = self._stays.get(request_id)
                if stay is not None and stay.ends == at and not stay.is_late:
                    stay.is_late = True
                    self._late += 1
                    self._late_offset += stay.prompt - stay.started
        self._seen = step

    def delay(self, candidate: Candidate, step: int) -> int:
        """Steps by which starting must be put off at the least; 0 if it fits now."""
        if self._alone is not None:
            return 1
        stay = self.stay_steps(candidate)
        first = self._index(step, stay)
        over = self._use[first : first + stay] + self._ramped(candidate.prompt + 1, stay)
        if self._late:
            over[0] += self._late_cells(step)
        over -= self.budget
        # At step p + k the excess shrinks by one for each step of delay, and k steps end it anyway.
        return max(0, int(np.minimum(over, self._ramped(1, stay), out=over).max()))

    def headroom(self, step: int, stay: int) -> Cells:
        """Largest prompt that fits now for stays of 1, 2, ... `stay` steps; negative if none does."""
        first = self._index(step, stay)
        room: Cells = (self.budget if self._alone is None else -1) - self._use[first : first + stay]
        room -= self._ramped(1, stay)
        if self._late:
            room[0] -= self._late_cells(step)
        return np.minimum.accumulate(room, out=room)

    def levels(self, step: int) -> list[int]:
        """Entry i: predicted use after batch `step + i`, plus i; the last belongs to the last completion.

        A newcomer's use falls by one with each step that it joins later, so levels compare directly.
        Beside one that runs alone, every level is above the budget.
        """
        count = max(self._last - step, 1)
        first = self._index(step, count)
        levels = self._use[first : first + count] + self._ramped(0, count)
        if self._late:
            levels[0] += self._late_cells(step)
        if self._alone is not None:
            levels = self._ramped(self.budget + 1, count)
        listed: list[int] = levels.tolist()
        return listed

    def add(self, candidate: Candidate, step: int, *, alone: bool = False) -> None:
        """`alone` marks one that exceeds the budget by itself: nobody may join it."""
        steps = self.stay_steps(candidate)
        first = self._index(step, steps)
        self._use[first : first + steps] += self._ramped(candidate.prompt + 1, steps)
        self._stays[candidate.id] = _RunningJob(candidate.prompt, step, step + steps)
        self._ending.setdefault(step + steps, []).append(candidate.id)
        self._last = max(self._last, step + steps)
        if alone:
            self._alone = candidate.id

    def remove(self, candidate: Candidate, step: int) -> None:
        """It left before `step`, at its predicted completion or not."""
        stay = self._stays.pop(candidate.id)
        if candidate.id == self._alone:
            self._alone = None
            self.releases += 1
        if stay.is_late:
            self._late -= 1
            self._late_offset -= stay.prompt - stay.started
            self.releases += 1
        elif step < stay.ends:
            left = stay.ends - step
            first = self._index(step, left)
            self._use[first : first + left] -= self._ramped(stay.prompt + 1 + step - stay.started, left)
            self.releases += 1

    def stay_steps(self, candidate: Candidate) -> int:
        """Predicted stay; not beyond what the budget could hold, which bounds the table."""
        return min(candidate.predicted, max(1, self.budget - candidate.prompt + 1))

    def _late_cells(self, step: int) -> int:
        return self._late_offset + self._late * (step + 1)

    def _ramped(self, first: int, steps: int) -> Cells:
        if first + steps > len(self._ramp):
            self._ramp = np.arange(2 * (first + steps))
        return self._ramp[first : first + steps]

    def _index(self, step: int, stay: int) -> int:
        """Index of the batch of `step`, with at least `stay` entries from there on."""
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
