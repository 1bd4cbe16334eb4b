"""What may a policy see? An immutable snapshot; asking "what if" gives a new one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.core.clock import Duration, Instant
from controlplane.core.memory import Footprint, LeaseTable
from controlplane.core.request import Owner, Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request without a lease. `until` bounds its wait; `rank` sorts it, smallest first."""

    request: Request
    footprint: Footprint
    until: Instant
    rank: tuple[float | int | str, ...] = ()
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an owner works now: one engine step, and one prompt token beside it."""

    step: Duration
    per_prompt_token: Duration


@dataclass(frozen=True, slots=True)
class Share:
    """One owner's part of the pool. `ceiling` and `held` in bytes; `largest` is the most one request
    could ever be given; `pace` is None until something was observed; `protected` leases are never
    chosen as victims."""

    ceiling: int
    held: int
    deficit: int
    largest: int
    free_slots: int
    leases: LeaseTable
    pace: Pace | None
    protected: frozenset[str] = frozenset()

    def with_lease(self, waiting: Waiting) -> "Share":
        request, footprint = waiting.request, waiting.footprint
        return replace(
            self,
            held=self.held + footprint.base,
            free_slots=self.free_slots - 1,
            leases=self.leases.with_lease(request.id, footprint, request.service_class.priority),
        )


@dataclass(frozen=True, slots=True)
class PoolView:
    """`queues` are in no promised order; `fresh` names those that no cycle has decided yet."""

    shares: Mapping[Owner, Share]
    queues: Mapping[Owner, Sequence[Waiting]]
    fresh: frozenset[str] = field(default_factory=frozenset)
