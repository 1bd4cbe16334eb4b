"""Which policies are there? Every one by its YAML name, one table a slot."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from controlplane.policy.admission import Fits, fits_ahead, fits_now
from controlplane.policy.admit_steps import (
    AheadPolicy,
    NowPolicy,
    ReservingPolicy,
    SkippingPolicy,
    by_arrival,
    by_deadline,
    by_length,
    by_slack,
)
from controlplane.policy.ordering import (
    EarliestDeadline,
    Fcfs,
    LeastSlack,
    Ordering,
    OrderingOptions,
)
from controlplane.policy.overflow import Overflow, by_chance, everyone, latest_first
from controlplane.policy.stepwise import StepOptions, StepPolicy
from controlplane.policy.tandem import Effort, TandemPolicy

ORDERINGS: Mapping[str, Callable[[OrderingOptions], Ordering]] = {
    "fcfs": Fcfs,
    "edf": EarliestDeadline,
    "least-slack": LeastSlack,
}

ADMISSIONS: Mapping[str, Fits] = {
    "look-ahead": fits_ahead,
    "fits-now": fits_now,
}

STEP_POLICIES: Mapping[str, Callable[[StepOptions], StepPolicy]] = {
    "mc-sf": lambda options: AheadPolicy(options, by_length, Overflow(everyone)),
    "mc-sf-skip": lambda options: SkippingPolicy(options, by_length, Overflow(everyone)),
    "mc-benchmark": lambda options: AheadPolicy(options, by_arrival, Overflow(everyone)),
    "edf": lambda options: AheadPolicy(options, by_deadline, Overflow(everyone)),
    "least-slack": lambda options: AheadPolicy(options, by_slack, Overflow(everyone)),
    "alpha-protection": lambda options: NowPolicy(options, Overflow(everyone), rests=False),
    "alpha-beta": lambda options: NowPolicy(options, Overflow(by_chance(options)), rests=False),
    "fcfs": lambda options: NowPolicy(options, Overflow(latest_first), rests=True),
    "tandem": lambda options: TandemPolicy(options, Overflow(latest_first), Effort()),
    "fcfs-reserve": lambda options: ReservingPolicy(options, Overflow(everyone)),
}

Policy = TypeVar("Policy")


def chosen(slot: str, table: Mapping[str, Policy], name: str) -> Policy:
    """Raises ValueError naming the valid entries."""
    if name not in table:
        raise ValueError(f"{slot}={name!r}: no such policy; choose one of {', '.join(sorted(table))}")
    return table[name]
