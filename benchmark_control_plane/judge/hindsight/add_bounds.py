"""Adds the bounds in hindsight to the results of a finished experiment, without running its systems again.

The experiment is read from the results themselves. A run gets a bound if the requests drawn now are as many
as it offered; results whose workload was drawn otherwise keep none.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, data_folder_option
from benchmark_control_plane.judge.experiment_file import Experiment, experiment_of_text
from benchmark_control_plane.judge.hindsight.hindsight_bounds import HindsightBounds
from benchmark_control_plane.judge.measurement_stages import requests_of


def add_bounds(results: Mapping[str, Any], data: Path | None) -> tuple[dict[str, Any], int]:
    """The results with bounds for the runs of simulated systems at the planned loads, and their number.

    Raises BadInput if the experiment cannot be read, or no run gets a bound.
    """
    experiment = experiment_of_text(results["experiment"]["yaml"], data_folder_option(data))
    capacity, runs, found = results.get("capacity_rps"), list(results["runs"]), 0
    if capacity is None:
        raise BadInput("capacity_rps: missing; run the experiment to its end first")
    by_window: dict[float, HindsightBounds] = {}
    systems = {system.name: system for system in experiment.plan.systems}
    for number, run in enumerate(runs):
        if (system := systems.get(run["system"])) is None:
            # Kept of an experiment that was continued without it.
            continue
        measured = run["duration_s"]
        window = replace(experiment.plan.window, measured_s=measured)
        shown = replace(experiment, plan=replace(experiment.plan, window=window))
        bounds = by_window.setdefault(measured, HindsightBounds(shown, results["slos"], capacity))
        is_planned = run["load"] in (system.loads or experiment.plan.loads)
        if system.is_simulated and is_planned and _offers(shown, run, capacity):
            runs[number] = {**run, "bound": bounds.of(system, run["load"], run["seed"])}
            found += 1
    if not found:
        raise BadInput(
            "no run gets a bound: only simulated systems have one, and the experiment must draw the requests "
            "that were offered; run it again"
        )
    return {**results, "runs": runs}, found


def _offers(experiment: Experiment, run: Mapping[str, Any], capacity: float) -> bool:
    """Whether the experiment draws as many requests as the run offered."""
    system = next(s for s in experiment.plan.systems if s.name == run["system"])
    drawn = requests_of(experiment, system, run["load"] * capacity, run["seed"])
    offered: float = run["offered_rps"] * run["duration_s"]
    return bool(abs(sum(not request.is_warmup for request in drawn) - offered) < 1)
