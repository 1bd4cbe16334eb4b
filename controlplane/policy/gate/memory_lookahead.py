"""Peak memory at predicted completions, and the first time at which one more lease fits (MC-SF, eq. 5).

Use only grows between completions, so it peaks just before one: only the predicted completion times need
checking (Online Scheduling for LLM Inference with KV Cache Constraints, eq. 5). With leases sorted by
completion, the use at each completion is a suffix sum, so testing one more lease costs O(n) vector work.
No margin is kept for prediction errors: it missed more SLOs than the preemptions that it avoided.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from controlplane.core.memory_ledger import Floats, Footprint, LeaseTable


@dataclass
class LookAhead:
    """Byte use of the leases in `table` at every predicted completion, in steps from now.

    Columns are computed on first use.
    """

    table: LeaseTable

    @cached_property
    def _order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self.table.steps)

    @cached_property
    def _grows(self) -> bool:
        """Whether any lease grows; if none does (embeddings) the peak is now."""
        return bool(np.count_nonzero(self.table.per_step))

    @cached_property
    def steps(self) -> Floats:
        """Predicted completions in ascending order, float64 [n]."""
        return self.table.steps[self._order]

    @cached_property
    def base(self) -> Floats:
        """Bytes held now by the leases that complete at entry k or later, float64 [n + 1]."""
        return _suffix_sums(self.table.base[self._order])

    @cached_property
    def per_step(self) -> Floats:
        """Growth in bytes per step of the same leases, float64 [n + 1]."""
        return _suffix_sums(self.table.per_step[self._order])

    @property
    def growth(self) -> float:
        """Bytes by which use exceeds that of now at its highest; 0 if it only falls."""
        use = self.base[:-1] + self.per_step[:-1] * self.steps
        return max(0.0, float(use.max(initial=0.0) - self.base[0]))

    def peak_with(self, footprint: Footprint) -> float:
        """Highest use in bytes at any completion up to that of the new lease."""
        if not (footprint.per_step or self._grows):
            return float(self.table.base.sum()) + footprint.base
        end = float(footprint.steps)
        at = int(np.searchsorted(self.steps, end, side="left"))
        own = float(self.base[at] + self.per_step[at] * end) + footprint.peak
        if at == 0:
            return own
        before = self.steps[:at]
        use = self.base[:at] + self.per_step[:at] * before
        use += footprint.base + footprint.per_step * before
        return max(own, float(use.max()))

    def steps_until_fits(self, footprint: Footprint, limit: float) -> float | None:
        """Steps until `footprint` at its peak fits at every later completion.

        None if it does not fit into `limit` even alone.
        """
        if footprint.peak > limit:
            return None
        use = self.base[:-1] + self.per_step[:-1] * self.steps
        overflowing = np.flatnonzero(use + footprint.peak > limit)
        return float(self.steps[overflowing[-1]]) if len(overflowing) else 0.0

    def steps_until_free(self, needed: float, limit: float) -> float | None:
        """Steps until completions have freed `needed` bytes below `limit`.

        None if `needed` exceeds `limit`.
        """
        if needed > limit:
            return None
        if float(self.table.base.sum()) + needed <= limit:
            return 0.0
        left = self.base[1:] + self.per_step[1:] * self.steps
        return float(self.steps[int(np.argmax(left + needed <= limit))])


def _suffix_sums(column: Floats) -> Floats:
    """Entry k sums column[k:]; one entry more than the column, the last is 0."""
    sums = np.zeros(len(column) + 1)
    np.cumsum(column[::-1], out=sums[1:])
    return sums[::-1]
