"""Bounds in hindsight on the attainment of the simulated systems of an experiment.

Systems with the same device and arrivals have the same bound.
"""

from dataclasses import dataclass, field
from typing import Any

from benchmark_control_plane.judge.experiment_file import Experiment
from benchmark_control_plane.judge.hindsight.attainment_bound import bound_of_parts, served_parts
from benchmark_control_plane.judge.hindsight.feasible_schedule import feasible_attainment
from benchmark_control_plane.judge.hindsight.least_work import least_works
from benchmark_control_plane.judge.measurement_stages import requests_of
from benchmark_control_plane.judge.records import slo_targets
from benchmark_control_plane.judge.system_schema import SystemSection
from benchmark_control_plane.judge.systems import Objectives


@dataclass(frozen=True, slots=True)
class HindsightBounds:
    """Bounds of one experiment; objectives in ms by class, capacity in requests per second."""

    experiment: Experiment
    objectives: Objectives
    capacity: float
    _known: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)

    def of(self, system: SystemSection, load: float, seed: int) -> dict[str, Any]:
        """The `bound` of a run in results.json: what no schedule exceeds, and what one attains."""
        plan = self.experiment.plan
        device = plan.device_of(system)
        arrivals = tuple(sorted((name, repr(stated)) for name, stated in system.arrivals.items()))
        key = (repr(device), arrivals, load, seed)
        if key not in self._known:
            requests = requests_of(self.experiment, system, load * self.capacity, seed)
            works = least_works(requests, device, slo_targets(self.objectives), plan.window.drain_s)
            parts = served_parts(works, device)
            self._known[key] = {
                "attainment": bound_of_parts(parts),
                "feasible": feasible_attainment(works, device, parts),
            }
        return self._known[key]
