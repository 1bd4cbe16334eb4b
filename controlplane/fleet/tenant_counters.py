"""Virtual token counters of tenants over a whole fleet, from the totals in the boxes' reports.

A counter is the tokens that a tenant was served, divided by its weight (Sheng et al. 2024, "Fairness in
serving large language models"). Every box counts for itself, and a router adds the differences between two
reports of a box, so that no store is shared and a lost report loses nothing. A tenant that was idle starts
level with the least served active tenant: idle time earns no credit.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

_MOST_LEFT = 1_000
"""Boxes that left whose totals are kept: one that was only silent comes back as the same process."""


class TenantCounters:
    """Counters of one router. `weights` are the tenants' shares, 1 for a tenant that states none."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._totals: dict[str, tuple[str, dict[str, int]]] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._counters: dict[str, float] = {}
        self._active: frozenset[str] = frozenset()

    def heard(self, box: str, epoch: str, served: Mapping[str, int]) -> dict[str, int]:
        """Adds what a box served since its last report, and returns these tokens by tenant.

        Totals of a new process count from zero. A total below the last one came late and is ignored.
        """
        self._left.pop(box, None)
        known_epoch, known = self._totals.get(box, (epoch, {}))
        if known_epoch != epoch:
            known = {}
        deltas = {
            tenant: more for tenant, total in served.items() if (more := total - known.get(tenant, 0)) > 0
        }
        self._totals[box] = (epoch, {**known, **{tenant: served[tenant] for tenant in deltas}})
        for tenant, tokens in deltas.items():
            weight = self._weights.get(tenant, 1.0)
            self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / weight
        return deltas

    def forget(self, box: str) -> None:
        """Drops the totals of a box that left the fleet, once a thousand others have left after it.

        What it served stays counted.
        """
        if box in self._totals:
            self._left[box] = None
            self._left.move_to_end(box)
        if len(self._left) > _MOST_LEFT:
            del self._totals[self._left.popitem(last=False)[0]]

    def set_active(self, tenants: Iterable[str]) -> None:
        """States which tenants have requests now; those that had none before are lifted."""
        active = frozenset(tenants)
        least = min((self._counters.get(tenant, 0.0) for tenant in self._active & active), default=None)
        if least is not None:
            for tenant in active - self._active:
                self._counters[tenant] = max(least, self._counters.get(tenant, 0.0))
        self._active = active

    def lead(self, tenant: str) -> float:
        """Weighted tokens by which a tenant is ahead of the least served active one."""
        least = min((self._counters.get(each, 0.0) for each in self._active), default=0.0)
        return max(0.0, self._counters.get(tenant, 0.0) - least)
