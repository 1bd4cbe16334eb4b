"""Which policies are there? Every one by its YAML name, one table a slot.

An ordering may serve the gate, where a request is decided once, the engine, where every step is, or both.
`fcfs`, `edf` and `least-slack` rank alike in both; `mc-sf` takes the shortest predicted answer first,
`srmt` the least remaining memory-time, and preempts for it; `apt` is Apt-Serve's pending time per block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from controlplane.core.clock import Duration, milliseconds
from controlplane.core.view import Waiting
from controlplane.policy.engine.apt_serve import AptServe
from controlplane.policy.engine.interface import EnginePolicy
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.engine.srmt import ShortestRemainingMemoryTime
from controlplane.policy.engine.static_priority import StaticPriorityPolicy
from controlplane.policy.gate.admission import (
    Admission,
    AdmissionOptions,
    Fits,
    fits_ahead,
    fits_always,
    fits_now,
)
from controlplane.policy.gate.ordering import (
    EarliestDeadline,
    Fcfs,
    LeastSlack,
    Ordering,
    OrderingOptions,
    ShortestAnswer,
)

_NEVER = milliseconds(86_400_000)

ForGate = Callable[[OrderingOptions], Ordering]
ForEngine = Callable[[EngineOptions], EnginePolicy]


@dataclass(frozen=True, slots=True)
class OrderingEntry:
    """None where it cannot be used."""

    gate: ForGate | None
    engine: ForEngine


def _ranked(ordering: ForGate, *, all_ahead: bool = False) -> ForEngine:
    def build(options: EngineOptions) -> EnginePolicy:
        limits = AdmissionOptions(options.overflow_probability, 0, _NEVER, Duration(0))
        fits = lookup("policy", ADMISSIONS, options.policy)
        return StaticPriorityPolicy(
            ordering(options.order()),
            Admission(limits, options.eviction(), fits),
            Admission(limits, options.eviction(), fits_always),
            look_ahead="all" if all_ahead else options.look_ahead,
        )

    return build


ORDERINGS: Mapping[str, OrderingEntry] = {
    "fcfs": OrderingEntry(Fcfs, _ranked(Fcfs)),
    "edf": OrderingEntry(EarliestDeadline, _ranked(EarliestDeadline)),
    "least-slack": OrderingEntry(LeastSlack, _ranked(LeastSlack)),
    "mc-sf": OrderingEntry(None, _ranked(ShortestAnswer, all_ahead=True)),
    "srmt": OrderingEntry(None, lambda options: ShortestRemainingMemoryTime(options.srmt())),
    "apt": OrderingEntry(None, lambda options: AptServe(options.missed_decay)),
}

ADMISSIONS: Mapping[str, Fits] = {
    "look-ahead": fits_ahead,
    "fits-now": fits_now,
}

Policy = TypeVar("Policy")


def lookup(slot: str, table: Mapping[str, Policy], name: str) -> Policy:
    """Raises ValueError naming the valid entries."""
    if name not in table:
        raise ValueError(f"{slot}={name!r}: no such policy; choose one of {', '.join(sorted(table))}")
    return table[name]


def gate_ordering(name: str, options: OrderingOptions) -> Ordering:
    """Raises ValueError naming the valid entries."""
    slot = "scheduling.ordering"
    usable = {key: order.gate for key, order in ORDERINGS.items() if order.gate is not None}
    if name in ORDERINGS and name not in usable:
        raise ValueError(
            f"{slot}={name!r}: it orders an engine's steps, not what waits at the gate; name it in "
            f"scheduling.engine.ordering, or choose one of {', '.join(sorted(usable))}"
        )
    return lookup(slot, usable, name)(options)


def engine_policy(options: EngineOptions) -> EnginePolicy:
    """Raises ValueError naming the valid entries, or an option that cannot be."""
    # Also where the ordering does not ask it.
    lookup("policy", ADMISSIONS, options.policy)
    return lookup("ordering", ORDERINGS, options.ordering).engine(options)


def engine_precedence(options: EngineOptions) -> Callable[[Waiting, Waiting], bool]:
    """Which of two that wait inside the engine starts first, as far as the gate can tell: by its own rank,
    or by work where the engine's order is none of the gate's."""
    if ORDERINGS[options.ordering].gate is None:
        return lambda one, other: (one.work, one.rank) < (other.work, other.rank)
    return lambda one, other: one.rank < other.rank
