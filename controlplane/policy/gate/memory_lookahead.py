"""Will the leases overflow before they end, and when does the next one fit?

Use only grows between completions, so it peaks just before one: only predicted completion times need
checking (MC-SF, Online Scheduling for LLM Inference with KV Cache Constraints, eq. 5). Sorted by
completion, the use at each is a suffix sum, so one more lease costs O(n) vector work, never O(n^2).
Prediction errors are independent, so their margin is `z` deviations of the *sum*.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
import numpy.typing as npt

from controlplane.core.memory import Floats, Footprint, LeaseTable


@dataclass
class LookAhead:
    """Byte use at every predicted completion of `table`, in steps from now. Columns exist once asked for."""

    table: LeaseTable
    z: float = 0.0

    @cached_property
    def _order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self.table.steps)

    @cached_property
    def _grows(self) -> bool:
        """Or may be more than was predicted. Embeddings do neither: the present is their peak."""
        return bool(np.count_nonzero(self.table.per_step) or np.count_nonzero(self.table.variance))

    @cached_property
    def steps(self) -> Floats:
        return self.table.steps[self._order]

    @cached_property
    def base(self) -> Floats:
        return _suffix_sums(self.table.base[self._order])

    @cached_property
    def per_step(self) -> Floats:
        return _suffix_sums(self.table.per_step[self._order])

    @cached_property
    def variance(self) -> Floats:
        return _suffix_sums(self.table.variance[self._order])

    def peak_with(self, footprint: Footprint) -> float:
        """Highest use, margin included, at any completion up to the newcomer's own."""
        if not (footprint.per_step or footprint.spread or self._grows):
            return float(self.table.base.sum()) + footprint.base
        end = float(footprint.steps)
        variance = footprint.spread**2
        at = int(np.searchsorted(self.steps, end, side="left"))
        own = float(self.base[at] + self.per_step[at] * end) + footprint.peak
        # Where all is certain the margin is 0, and to find that out step by step takes long.
        z = self.z if variance or self.table.variance.any() else 0.0
        if z:
            own += z * sqrt(float(self.variance[at]) + variance)
        if at == 0:
            return own
        before = self.steps[:at]
        use = self.base[:at] + self.per_step[:at] * before
        use += footprint.base + footprint.per_step * before
        if z:
            use += z * np.sqrt(self.variance[:at] + variance)
        return max(own, float(use.max()))

    def steps_until_fits(self, footprint: Footprint, limit: float) -> float | None:
        """Steps until `footprint`, taken at its peak, fits beside what is left at every later completion,
        margin included. `None` if it does not fit into `limit` by itself."""
        if footprint.peak > limit:
            return None
        use = self.base[:-1] + self.per_step[:-1] * self.steps
        if self.z:
            use += self.z * np.sqrt(self.variance[:-1] + footprint.spread**2)
        overflowing = np.flatnonzero(use + footprint.peak > limit)
        return float(self.steps[overflowing[-1]]) if len(overflowing) else 0.0

    def steps_until_free(self, needed: float, limit: float) -> float | None:
        """Steps until completions have brought use down so far that `needed` bytes fit.

        `None` if not even an empty pool has them.
        """
        if needed > limit:
            return None
        if not len(self.steps) or float(self.base[0]) + needed <= limit:
            return 0.0
        left = self.base[1:] + self.per_step[1:] * self.steps
        return float(self.steps[int(np.argmax(left + needed <= limit))])


def _suffix_sums(column: Floats) -> Floats:
    """Entry k sums column[k:]; one entry more than the column, the last 0."""
    sums = np.zeros(len(column) + 1)
    np.cumsum(column[::-1], out=sums[1:])
    return sums[::-1]
