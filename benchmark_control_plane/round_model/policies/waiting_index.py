"""Who waits, in order, as columns? Sorted by key, so that one vector operation asks all at once."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.round_model.policies.interface import Candidate

Columns = npt.NDArray[np.int64]
Key = tuple[float, ...]

_FIRST_PLACES = 64


@dataclass(slots=True)
class WaitingLine:
    """Row 0 of the columns holds prompts, row 1 predicted steps; column i belongs to `candidates[i]`."""

    keys: list[Key] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    _columns: Columns = field(default_factory=lambda: np.zeros((2, _FIRST_PLACES), np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def prompts(self) -> Columns:
        return self._columns[0, : len(self.keys)]

    @property
    def stays(self) -> Columns:
        return self._columns[1, : len(self.keys)]

    def insert(self, key: Key, candidate: Candidate, stay: int) -> None:
        count = len(self.keys)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.candidates.insert(at, candidate)
        self._columns[:, at + 1 : count + 1] = self._columns[:, at:count]
        self._columns[0, at] = candidate.prompt
        self._columns[1, at] = stay

    def pop(self, at: int) -> Candidate:
        count = len(self.keys)
        del self.keys[at]
        self._columns[:, at : count - 1] = self._columns[:, at + 1 : count]
        return self.candidates.pop(at)
