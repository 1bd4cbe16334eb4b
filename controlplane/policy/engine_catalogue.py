"""Which policies order an engine's steps? By name, each built from one flat table of options.

`fcfs`, `edf` and `least-slack` rank as the gate does, `mc-sf` takes the shortest predicted answer first,
`srmt` the least remaining memory-time, and preempts for it; `apt` is Apt-Serve's pending time per block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from controlplane.core.clock import Duration, milliseconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Request
from controlplane.core.view import Pace
from controlplane.policy.admission import Admission, AdmissionOptions
from controlplane.policy.apt import AptKv
from controlplane.policy.catalogue import ADMISSIONS, ORDERINGS, chosen
from controlplane.policy.engine_step import EnginePolicy
from controlplane.policy.eviction import EvictionOptions
from controlplane.policy.ordering import Ordering, OrderingOptions, Rank
from controlplane.policy.ranked import LookAheadFor, RankedPolicy
from controlplane.policy.srmt import ShortestRemaining, SrmtOptions

_NEVER = milliseconds(86_400_000)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Flat, with the names of the sections `scheduling` and `admission`. `look_ahead` says whom the
    admission's look-ahead asks; it is for the ranked orderings, and the last are for `srmt` and `apt`."""

    ordering: str = "edf"
    policy: str = "look-ahead"
    look_ahead: LookAheadFor = "background"
    overflow_probability: float = 0.05
    priority_head_start_ms: float = 1_000
    patience_ms: float = 10_000
    victim_tau_ms: float = 100
    victim_almost_done_steps: int = 8
    victim_thrash_penalty: float = 1.0
    preempt_ratio: float = 1.5
    urgency: float = 0.5
    size_cut_share: float = 0.85
    size_cut_window: int = 200
    starvation_ms: float = 300_000
    aged_slots: int = 1
    missed_decay: float = 0.0

    def __post_init__(self) -> None:
        chosen("scheduling.ordering", ENGINE_ORDERINGS, self.ordering)
        chosen("admission.policy", ADMISSIONS, self.policy)
        if self.look_ahead not in ("all", "background", "nobody"):
            raise ValueError(f"look_ahead={self.look_ahead!r}: choose all, background or nobody")
        if not 0 < self.overflow_probability < 1:
            raise ValueError(f"overflow_probability={self.overflow_probability}: between 0 and 1")

    def changed(self, by: Mapping[str, Any]) -> "EngineOptions":
        """Raises ValueError naming an unknown key, or a value that cannot be."""
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(by) - set(known)):
            raise ValueError(f"scheduler option {unknown[0]!r}: unknown; known are {', '.join(known)}")
        return replace(self, **by)

    def built(self) -> EnginePolicy:
        return ENGINE_ORDERINGS[self.ordering](self)


@dataclass(frozen=True, slots=True)
class ShortestAnswer:
    """Keys: predicted output tokens to come, arrival, id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        return (footprint.steps, request.arrival, request.id)


def _ranked(ordering: Callable[[OrderingOptions], Ordering], *, all_ahead: bool = False) -> Any:
    def build(options: EngineOptions) -> EnginePolicy:
        limits = AdmissionOptions(options.overflow_probability, 0, _NEVER, Duration(0))
        eviction = EvictionOptions(
            milliseconds(options.victim_tau_ms),
            options.victim_almost_done_steps,
            options.victim_thrash_penalty,
        )
        order = OrderingOptions(
            milliseconds(options.priority_head_start_ms), milliseconds(options.patience_ms)
        )
        return RankedPolicy(
            ordering(order),
            Admission(limits, eviction, ADMISSIONS[options.policy]),
            Admission(limits, eviction, _anything),
            look_ahead="all" if all_ahead else options.look_ahead,
        )

    return build


def _anything(*_: object) -> bool:
    """Present use alone decides: that the base fits is checked before."""
    return True


def _srmt(options: EngineOptions) -> EnginePolicy:
    return ShortestRemaining(
        SrmtOptions(
            preempt_ratio=options.preempt_ratio,
            urgency=options.urgency,
            share=options.size_cut_share,
            window=options.size_cut_window,
            patience=milliseconds(options.starvation_ms),
            aged_slots=options.aged_slots,
        )
    )


ENGINE_ORDERINGS: Mapping[str, Callable[[EngineOptions], EnginePolicy]] = {
    **{name: _ranked(ordering) for name, ordering in ORDERINGS.items()},
    "mc-sf": _ranked(ShortestAnswer, all_ahead=True),
    "srmt": _srmt,
    "apt": lambda options: AptKv(options.missed_decay),
}
