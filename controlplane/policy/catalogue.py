"""Which policies are there? Every one by its YAML name, one table a slot."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from controlplane.policy.admission import Fits, fits_ahead, fits_now
from controlplane.policy.ordering import (
    EarliestDeadline,
    Fcfs,
    LeastSlack,
    Ordering,
    OrderingOptions,
)

ORDERINGS: Mapping[str, Callable[[OrderingOptions], Ordering]] = {
    "fcfs": Fcfs,
    "edf": EarliestDeadline,
    "least-slack": LeastSlack,
}

ADMISSIONS: Mapping[str, Fits] = {
    "look-ahead": fits_ahead,
    "fits-now": fits_now,
}

Policy = TypeVar("Policy")


def chosen(slot: str, table: Mapping[str, Policy], name: str) -> Policy:
    """Raises ValueError naming the valid entries."""
    if name not in table:
        raise ValueError(f"{slot}={name!r}: no such policy; choose one of {', '.join(sorted(table))}")
    return table[name]
