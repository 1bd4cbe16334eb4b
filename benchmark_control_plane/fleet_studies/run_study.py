"""Runs a study of simulated fleets and writes its results, one file named after the study."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.command_line import data_folder_option
from benchmark_control_plane.common.results_file import write_json
from benchmark_control_plane.fleet_studies.autoscaling_study import autoscaling
from benchmark_control_plane.fleet_studies.client_sections import FairnessStudy, StormStudy
from benchmark_control_plane.fleet_studies.fleet_capacity import fleet_capacity
from benchmark_control_plane.fleet_studies.fleet_scale import fleet_scale
from benchmark_control_plane.fleet_studies.global_fairness import global_fairness
from benchmark_control_plane.fleet_studies.kinds_of_boxes import kinds_of_boxes
from benchmark_control_plane.fleet_studies.oracle_accuracy import oracle_accuracy
from benchmark_control_plane.fleet_studies.retry_storms import retry_storms
from benchmark_control_plane.fleet_studies.study_file import (
    AccuracyStudy,
    AutoscalingStudy,
    CapacityStudy,
    KindsStudy,
    ScaleStudy,
    SweepStudy,
)
from benchmark_control_plane.fleet_studies.study_reader import read_study
from benchmark_control_plane.fleet_studies.sweeps import sweep

_RUN: Mapping[type, Callable[[Any, Path], dict[str, Any]]] = {
    SweepStudy: sweep,
    AutoscalingStudy: autoscaling,
    CapacityStudy: lambda study, data: fleet_capacity(study),
    ScaleStudy: lambda study, data: fleet_scale(study),
    AccuracyStudy: lambda study, data: oracle_accuracy(study),
    KindsStudy: lambda study, data: kinds_of_boxes(study),
    StormStudy: lambda study, data: retry_storms(study),
    FairnessStudy: lambda study, data: global_fairness(study),
}


def run_study(
    path: Path, out: Path, *, seeds: Sequence[int] | None, is_quick: bool, data: Path | None
) -> Path:
    """Runs the study of a file; the arguments are those of `run_experiment`.

    Returns the file of the results, NAME.json in `out`. Raises ConfigError, BadInput and OSError.
    """
    study = read_study(path, seeds)
    if is_quick:
        study = study.quick()
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{study.name}.json"
    write_json(file, _RUN[type(study)](study, data_folder_option(data)))
    return file
