"""The policies of the round model by name, in one literal table.

They plan rounds of known length and cost more than an engine step allows; a server does not offer them.
"""

from collections.abc import Callable, Mapping

from benchmark_control_plane.round_model.policies.mcsf_and_baselines import (
    CurrentUsePolicy,
    LookaheadPolicy,
    PeakReservationPolicy,
    SkippingLookaheadPolicy,
    by_arrival,
    by_deadline,
    by_length,
    by_slack,
)
from benchmark_control_plane.round_model.policies.overflow import (
    OverflowClearing,
    clear_all,
    clear_at_random,
    clear_latest,
)
from benchmark_control_plane.round_model.policies.step_policy import StepOptions, StepPolicy
from benchmark_control_plane.round_model.policies.tandem import SearchLimits, TandemPolicy

STEP_POLICIES: Mapping[str, Callable[[StepOptions], StepPolicy]] = {
    "mc-sf": lambda options: LookaheadPolicy(options, by_length, OverflowClearing(clear_all)),
    "mc-sf-skip": lambda options: SkippingLookaheadPolicy(options, by_length, OverflowClearing(clear_all)),
    "mc-benchmark": lambda options: LookaheadPolicy(options, by_arrival, OverflowClearing(clear_all)),
    "edf": lambda options: LookaheadPolicy(options, by_deadline, OverflowClearing(clear_all)),
    "least-slack": lambda options: LookaheadPolicy(options, by_slack, OverflowClearing(clear_all)),
    "alpha-protection": lambda options: CurrentUsePolicy(
        options, OverflowClearing(clear_all), rests_after_clear=False
    ),
    "alpha-beta": lambda options: CurrentUsePolicy(
        options, OverflowClearing(clear_at_random(options)), rests_after_clear=False
    ),
    "fcfs": lambda options: CurrentUsePolicy(options, OverflowClearing(clear_latest), rests_after_clear=True),
    "tandem": lambda options: TandemPolicy(options, OverflowClearing(clear_latest), SearchLimits()),
    "fcfs-reserve": lambda options: PeakReservationPolicy(options, OverflowClearing(clear_all)),
}
