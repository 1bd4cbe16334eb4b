"""Ray Serve's interface to the rule that decides how many boxes of a kind there are.

Ray Serve calls the policy in its controller, with the utilisations that the boxes record (`box.USE`). It
starts boxes, and drains those that it removes. Both interfaces are alpha.
"""

import time
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from controlplane.config.fleet_file import BoxKind
from controlplane.fleet.autoscaling import BoxScaler, ScalingRule
from controlplane.fleet_on_ray.box import USE

_REPORTS_PER_START = 60
_LEAST_INTERVAL_S = 0.5


class UtilisationPolicy:
    """The policy of one kind; Ray Serve makes one object for each deployment, from `policy_kwargs`."""

    def __init__(self, **rule: Any) -> None:
        self._scaler = BoxScaler(ScalingRule(**rule))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of boxes, and no state: what is observed stays in this object."""
        uses = (context.aggregated_metrics or {}).get(USE, {})
        known = [uses[replica] for replica in context.running_replicas if replica in uses]
        running, target = context.current_num_replicas, context.target_num_replicas
        return self._scaler.target(known, running, target, time.monotonic()), {}


def autoscaling(kind: BoxKind) -> AutoscalingConfig | None:
    """The autoscaling of a kind's deployment; None if its number does not change."""
    stated = kind.autoscale
    if stated is None:
        return None
    interval = max(_LEAST_INTERVAL_S, stated.start_s / _REPORTS_PER_START)
    return AutoscalingConfig(
        # Without `initial_replicas`, to which Ray Serve returns at each change of the deployment.
        min_replicas=kind.boxes,
        max_replicas=stated.max_boxes,
        metrics_interval_s=interval,
        look_back_period_s=2 * interval,
        # The rule itself decides when.
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(
            policy_function=UtilisationPolicy,
            policy_kwargs={
                "min_boxes": kind.boxes,
                "max_boxes": stated.max_boxes,
                "start": stated.start_s,
                "utilisation": stated.utilisation,
                "lower_after": stated.lower_after_s,
            },
        ),
    )
