"""Reads a study of simulated fleets, a YAML file for `tandem bench run`.

The key `study` names what is done; the other keys depend on it, and one without effect is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.fleet_studies.client_sections import FairnessStudy, StormStudy
from benchmark_control_plane.fleet_studies.study_file import (
    AccuracyStudy,
    AutoscalingStudy,
    CapacityStudy,
    KindsStudy,
    ScaleStudy,
    SweepStudy,
)
from benchmark_control_plane.judge.experiment_file import merge, read_extended
from controlplane.config.loader import parse_as

Study = (
    SweepStudy
    | CapacityStudy
    | ScaleStudy
    | AccuracyStudy
    | KindsStudy
    | AutoscalingStudy
    | StormStudy
    | FairnessStudy
)
STUDIES: Mapping[str, type[Study]] = {
    "sweep": SweepStudy,
    "capacity": CapacityStudy,
    "scale": ScaleStudy,
    "accuracy": AccuracyStudy,
    "kinds": KindsStudy,
    "autoscaling": AutoscalingStudy,
    "storms": StormStudy,
    "fairness": FairnessStudy,
}
"""Sections of a file by its key `study`."""


def read_study(path: Path, seeds: Sequence[int] | None = None) -> Study:
    """Parses a study, with other `seeds` if they are given. Raises ConfigError and BadInput."""
    content, _ = read_extended(path)
    kind = STUDIES.get(str(content.pop("study", ""))) if isinstance(content, dict) else None
    if not isinstance(content, dict) or kind is None:
        raise BadInput(f"{path}: study: should be one of {', '.join(STUDIES)}")
    base = {key: content[key] for key in ("fleet", "load") if isinstance(content.get(key), Mapping)}
    if isinstance(cells := content.get("cells"), Mapping) and kind is SweepStudy:
        content["cells"] = {
            name: merge(base, cell) if isinstance(cell, Mapping) else cell for name, cell in cells.items()
        }
    return parse_as(kind, content | ({"seeds": list(seeds)} if seeds else {}), source=str(path))
