"""Finds the rate per box that fleets of several sizes carry, and what their reports cost."""

from collections.abc import Iterator
from itertools import product
from statistics import fmean
from typing import Any

from benchmark_control_plane.fleet_studies.study_file import CapacityStudy
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import FleetScenario, FleetWorkload

_REPORT_BYTES = 340
_FEWEST_REQUESTS = 2_000
"""So that a fleet of one box has a figure."""


def fleet_capacity(study: CapacityStudy) -> dict[str, Any]:
    """A row for each number of boxes and policy."""
    return {
        "study": "capacity",
        "boxes": list(study.boxes),
        "seconds": study.seconds,
        "seeds": list(study.seeds),
        "rows": list(_rows(study)),
    }


def _rows(study: CapacityStudy) -> Iterator[dict[str, Any]]:
    for boxes, policy in product(study.boxes, study.policies):
        scenario = FleetScenario(boxes, policy=policy, ttft=study.ttft_ms / 1_000)
        reports = _REPORT_BYTES * boxes * scenario.routers / scenario.report_period
        yield {
            "boxes": boxes,
            "policy": policy.name,
            "rate_per_box": round(_highest_rate(scenario, study), 2),
            "report_bytes_per_second": round(reports),
        }


def _highest_rate(scenario: FleetScenario, study: CapacityStudy) -> float:
    """The highest rate per box at which enough requests meet their objectives, to 1 %."""
    low, high = 1.0, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        seconds = max(study.seconds, _FEWEST_REQUESTS / (scenario.boxes * middle))
        kept = fmean(
            simulate_fleet(scenario, FleetWorkload.drawn(middle * scenario.boxes, seconds, seed)).attainment
            for seed in study.seeds
        )
        low, high = (middle, high) if kept >= study.kept else (low, middle)
    return low
