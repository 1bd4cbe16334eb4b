"""Options of an engine policy in one flat table, with the gate's names for shared options.

`controlplane.policy.registry.engine_policy` builds the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from controlplane.core.clock import milliseconds
from controlplane.policy.engine.srmt import SrmtOptions
from controlplane.policy.engine.static_priority import LookAheadFor
from controlplane.policy.gate.ordering import OrderingOptions
from controlplane.policy.gate.preemption import PreemptionOptions

_DAY_MS = 86_400_000
_MOST = 10**9


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Names are those of the configuration sections `scheduling` and `admission`.

    `look_ahead` says which requests the admission's look-ahead applies to; it is for the static orderings, as
    are `policy` and `victims`. The options from `preempt_ratio` to `prefill_weight` are for `srmt`,
    `missed_decay` for `apt`. `decode_pacing` is the share of the TPOT objective that a step may last while
    embeddings are pending. `extra` holds the settings of a plug-in policy.
    """

    ordering: str = "edf"
    policy: str = "look-ahead"
    victims: str = "cheapest-sufficient"
    look_ahead: LookAheadFor = "background"
    decode_pacing: float = 0.8
    overflow_probability: float = 0.05
    priority_head_start_ms: float = 1_000.0
    default_deadline_ms: float = 10_000.0
    victim_tau_ms: float = 100.0
    victim_almost_done_steps: int = 8
    victim_thrash_penalty: float = 1.0
    preempt_ratio: float = 1.1
    urgency: float = 0.5
    settle_steps: int = 12
    size_cutoff_share: float = 0.75
    size_cutoff_window: int = 600
    starvation_ms: float = 300_000.0
    aged_share: float = 0.02
    prefill_weight: float = 1.0
    missed_decay: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.look_ahead not in ("all", "background", "nobody"):
            raise ValueError(f"look_ahead={self.look_ahead!r}: unknown; choose all, background or nobody")
        if not 0 < self.overflow_probability < 1:
            raise ValueError(
                f"overflow_probability={self.overflow_probability}: must be greater than 0 and less than 1"
            )
        if not 0 <= self.decode_pacing < 1:
            raise ValueError(f"decode_pacing={self.decode_pacing}: must be at least 0 (no delay) and less than 1")
        if not 0 <= self.missed_decay <= 1:
            raise ValueError(
                f"missed_decay={self.missed_decay}: a share of the value; must be between 0 and 1"
            )
        # Values out of range are errors whichever ordering is chosen.
        self.order(), self.eviction(), self.srmt()

    def changed(self, by: Mapping[str, Any]) -> "EngineOptions":
        """A copy with these options. Raises ValueError naming an unknown key or a value out of range."""
        known = [known_field.name for known_field in fields(self)]
        if unknown := sorted(set(by) - set(known)):
            raise ValueError(f"engine option {unknown[0]!r}: unknown; known are {', '.join(known)}")
        for name, value in by.items():
            _require_alike(name, getattr(self, name), value)
        return replace(self, **by)

    def order(self) -> OrderingOptions:
        """Options of a static ordering."""
        return OrderingOptions(
            milliseconds(self.priority_head_start_ms), milliseconds(self.default_deadline_ms), self.extra
        )

    def eviction(self) -> PreemptionOptions:
        """Options of the choice of preemption victims."""
        return PreemptionOptions(
            milliseconds(self.victim_tau_ms), self.victim_almost_done_steps, self.victim_thrash_penalty
        )

    def srmt(self) -> SrmtOptions:
        """Options of shortest remaining memory-time."""
        return SrmtOptions(
            preempt_ratio=self.preempt_ratio,
            urgency=self.urgency,
            settle=self.settle_steps,
            share=self.size_cutoff_share,
            window=self.size_cutoff_window,
            patience=milliseconds(self.starvation_ms),
            aged_share=self.aged_share,
            price=self.prefill_weight,
        )


def _require_alike(name: str, present: object, value: object) -> None:
    """Checks a value of a file or a remote call: it must have the type of `present` and be in range."""
    if isinstance(present, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r}: a mapping is needed")
        return
    wanted: tuple[type, ...] = (int, float) if isinstance(present, float) else (type(present),)
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = {str: "a name", int: "a whole number", float: "a number"}[type(present)]
        raise ValueError(f"{name}={value!r}: {kind} is needed")
    if not isinstance(value, str) and not -_MOST <= value <= _MOST:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a number of at most {_MOST} is needed")
    if name.endswith("_ms") and not 0 <= value <= _DAY_MS:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a time from 0 to {_DAY_MS} ms is needed")
