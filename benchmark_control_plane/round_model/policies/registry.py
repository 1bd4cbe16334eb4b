"""The policies of the round model by name, in one literal table.

They plan rounds of known length offline and cost more than an engine step allows; no server runs them.
"""

from collections.abc import Callable, Mapping

from benchmark_control_plane.round_model.policies.interface import StepOptions, StepPolicy
from benchmark_control_plane.round_model.policies.overflow import (
    Overflow,
    by_chance,
    everyone,
    latest_first,
)
from benchmark_control_plane.round_model.policies.published import (
    AheadPolicy,
    NowPolicy,
    ReservingPolicy,
    SkippingPolicy,
    by_arrival,
    by_deadline,
    by_length,
    by_slack,
)
from benchmark_control_plane.round_model.policies.tandem import Effort, TandemPolicy

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
