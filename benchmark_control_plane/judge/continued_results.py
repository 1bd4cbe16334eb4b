"""What `tandem bench run --resume` keeps of an interrupted experiment, or of one with fewer loads or seeds.

Runs of one file share objectives and capacity, so these are kept too, and the rest of the experiment and the
machine must be what they were.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import Experiment, experiment_of_text
from benchmark_control_plane.judge.system_schema import SystemSection

_MAY_DIFFER = {"question", "loads", "seeds", "systems", "frontier"}
_REMEDY = "leave out --resume, or write to another folder"


def read_kept(experiment: Experiment, environment: Mapping[str, Any], file: Path) -> dict[str, Any] | None:
    """Content of results that `experiment` continues; None if the file is missing or has no capacity yet.

    Raises BadInput if they come from another experiment or another machine. Loads, seeds and systems may be
    added or left out; the commit may be another one.
    """
    if not file.exists():
        return None
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if kept["capacity_rps"] is None:
        return None
    if changed := _changed(experiment, experiment_of_text(kept["experiment"]["yaml"], experiment.data)):
        raise BadInput(f"{file}: {', '.join(changed)} differ from those of {experiment.plan.name}; {_REMEDY}")
    machine, former = dict(environment), dict(kept["environment"])
    del machine["commit"], former["commit"]
    if machine != former:
        names = ", ".join(n for n in {**machine, **former} if machine.get(n) != former.get(n))
        raise BadInput(f"{file}: was measured in another environment ({names}); {_REMEDY}")
    return kept


def _changed(experiment: Experiment, former: Experiment) -> list[str]:
    """Names of the settings and systems that are not what they were."""
    now, then = experiment.plan, former.plan
    settings = (each.name for each in fields(now) if each.name not in _MAY_DIFFER)
    changed = [name for name in settings if getattr(now, name) != getattr(then, name)]
    measured = {system.name: _measured(system) for system in then.systems}
    return changed + [
        f"system {system.name!r}"
        for system in now.systems
        if _measured(system) != measured.get(system.name, _measured(system))
    ]


def _measured(system: SystemSection) -> SystemSection:
    return replace(system, description="", loads=None, seeds=None, frontier=True)


def keep_requests(file: Path, runs: int) -> None:
    """Drops from requests.jsonl what an interruption left of a run that is not among the first `runs`."""
    part = file.with_name(f"{file.name}.part")
    with file.open("rb") as lines, part.open("wb") as kept:
        for line in lines:
            if not line.endswith(b"\n") or orjson.loads(line)["run"] >= runs:
                break
            kept.write(line)
    part.replace(file)
