"""Options of an engine policy in one flat table, with the gate's names for shared options.

`controlplane.policy.registry.engine_policy` builds the policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from controlplane.core.clock import milliseconds
from controlplane.policy.engine.size_cutoff import FEWEST_ARRIVALS
from controlplane.policy.engine.static_priority import LookAheadFor
from controlplane.policy.gate.ordering import OrderingOptions

_DAY_MS = 86_400_000
_MOST = 10**9
_RANGES = (
    ("urgency", 0, 1),
    ("size_cutoff_share", 0, 2),
    ("aged_share", 0, 1),
    ("prefill_weight", 0, 10),
    ("recompute_weight", 0, 100),
    ("settle_steps", 0, 1_000),
    ("size_cutoff_window", FEWEST_ARRIVALS, 100_000),
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the policy that runs inside vLLM.

    In YAML, an option with the name of a key of `scheduling` or `admission` defaults to that key's value.
    """

    ordering: str = "srmt"
    """Engine policy: `fcfs`, `edf` or `least-slack` (static priority), `mc-sf` (fewest predicted output
    tokens first), `srmt` (smallest remaining memory-time over class weight) or `apt` (Apt-Serve)."""
    policy: str = "look-ahead"
    """Admission rule of the static-priority orderings: `look-ahead` or `fits-now`."""
    victims: str = "latest-started"
    """Which running requests of one priority are preempted first: a name of the slot `victims`."""
    look_ahead: LookAheadFor = "background"
    """Requests that must fit until their end before they start: `all`, `background` (requests without a
    deadline left to meet) or `none`. For `fcfs`, `edf` and `least-slack`."""
    decode_pacing: float = 0.8
    """While an embedding pass is under way, delay a decode step up to this share of the tightest TPOT in the
    running batch, so that fewer steps serve more requests, as far as half of the memory suffices for it; 0
    never delays. At least 0, below 1."""
    priority_head_start_ms: float = 1_000.0
    """Each unit of priority ranks a request as if it had arrived, or were due, this much earlier."""
    default_deadline_ms: float = 10_000.0
    """Deadline for ordering of a request without an objective, counted from its arrival."""
    preempt_ratio: float = 1.1
    """`srmt`: an urgent request may preempt one whose remaining memory-time is this many times larger.
    At least 1."""
    urgency: float = 0.25
    """`srmt`: a waiting request is urgent after this share of its TTFT objective. From 0 to 1."""
    settle_steps: int = 60
    """`srmt`: start a request that is not urgent only if no preemption is predicted for this many steps.
    From 0 to 1000."""
    size_cutoff_share: float = 0.75
    """`srmt`: share of the memory that the size cutoff plans for; larger requests start only when memory is
    free. 0 disables the cutoff. From 0 to 2."""
    size_cutoff_window: int = 600
    """`srmt`: number of arrivals that the size cutoff is computed from. From 30 to 100000."""
    starvation_ms: float = 30_000.0
    """`srmt`: after this time a request that missed its objective is served in order of arrival, on
    `aged_share` of the memory. The gate predicts at least this wait for a request above the size cutoff."""
    aged_share: float = 0.02
    """`srmt`: share of the memory for requests older than `starvation_ms`; 0 disables it. From 0 to 1."""
    prefill_weight: float = 1.0
    """`srmt`: weight of the prefill cost in a request's size; 0 counts memory-time alone. From 0 to 10."""
    recompute_weight: float = 3.0
    """`srmt`: weight of what a victim would compute again, against its remaining memory-time, as a multiple
    of `prefill_weight`; 0 chooses victims by remaining memory-time alone. From 0 to 100."""
    missed_decay: float = 0.0
    """`apt`: value of a request that missed its objective, relative to one that can meet it. From 0 to 1."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of a plug-in policy, unparsed: a mapping that the plug-in checks."""

    def __post_init__(self) -> None:
        if self.look_ahead not in ("all", "background", "none"):
            raise ValueError(f"look_ahead={self.look_ahead!r}: unknown; choose all, background or none")
        if not 0 <= self.decode_pacing < 1:
            raise ValueError(
                f"decode_pacing={self.decode_pacing}: must be at least 0 (no delay) and less than 1"
            )
        if not 0 <= self.missed_decay <= 1:
            raise ValueError(
                f"missed_decay={self.missed_decay}: a share of the value; must be between 0 and 1"
            )
        # Values out of range are errors whichever ordering is chosen.
        if self.preempt_ratio < 1:
            raise ValueError(
                f"preempt_ratio={self.preempt_ratio}: must be at least 1, or two requests preempt each other"
            )
        for name, low, high in _RANGES:
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(f"{name}={value}: must be between {low} and {high}")

    def changed(self, by: Mapping[str, Any]) -> "EngineOptions":
        """A copy with these options. Raises ValueError naming an unknown key or a value out of range."""
        known = [known_field.name for known_field in fields(self)]
        if unknown := sorted(set(by) - set(known)):
            raise ValueError(f"engine option {unknown[0]!r}: unknown; known are {', '.join(known)}")
        # The present value of a time may be a whole number, and the next one a fraction.
        usual = EngineOptions()
        for name, value in by.items():
            _require_alike(name, getattr(usual, name), value)
        return replace(self, **by)

    def ordering_options(self) -> OrderingOptions:
        """Options of a static ordering."""
        return OrderingOptions(
            milliseconds(self.priority_head_start_ms), milliseconds(self.default_deadline_ms), self.extra
        )


def _require_alike(name: str, usual: object, value: object) -> None:
    """Checks a value of a file or a remote call: it must have the type of the default and be in range."""
    if isinstance(usual, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r}: a mapping is needed")
        return
    wanted: tuple[type, ...] = (int, float) if isinstance(usual, float) else (type(usual),)
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = {str: "a name", int: "a whole number", float: "a number"}[type(usual)]
        raise ValueError(f"{name}={value!r}: {kind} is needed")
    if not isinstance(value, str) and not -_MOST <= value <= _MOST:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a number of at most {_MOST} is needed")
    if name.endswith("_ms") and not 0 <= value <= _DAY_MS:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: a time from 0 to {_DAY_MS} ms is needed")
