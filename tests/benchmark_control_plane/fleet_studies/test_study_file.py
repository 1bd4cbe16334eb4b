"""Files of fleet studies: the committed ones state the committed results, and mistakes are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.fleet_studies.study_file import (
    AccuracyStudy,
    CapacityStudy,
    ScaleStudy,
    SweepStudy,
)
from benchmark_control_plane.fleet_studies.study_reader import read_study
from controlplane.config import ConfigError

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmark_control_plane/results"
FILES = sorted((ROOT / "configs/bench").glob("fleet-*.yaml"))
WITH_RESULTS = [path for path in FILES if (RESULTS / f"{path.stem}.json").exists()]
SWEEP: dict[str, Any] = {
    "study": "sweep",
    "name": "mine",
    "question": "Which?",
    "fleet": {"boxes": 4},
    "load": {"rate_per_box": 10, "seconds": 3},
    "sweeps": [{"policy": ["TANDEM", "RANDOM"]}],
}
STREAM = {"kind": "generate", "service_class": "chat", "share": 1, "trace": {"name": "ragpulse"}}


def written(folder: Path, content: object) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_committed_study_is_valid_and_named_after_its_file(path: Path) -> None:
    study = read_study(path)
    assert study.name == path.stem
    assert study.quick().name == path.stem


@pytest.mark.parametrize("path", WITH_RESULTS, ids=lambda path: path.stem)
def test_a_committed_study_states_the_sizes_of_its_committed_results(path: Path) -> None:
    study = read_study(path)
    found = json.loads((RESULTS / f"{path.stem}.json").read_text(encoding="utf-8"))
    match study:
        case SweepStudy():
            assert (found["boxes"], found["seconds"]) == ([study.fleet.boxes], study.load.seconds)
            assert (found.get("warm_up", 0.0), found["seeds"]) == (study.load.warm_up, list(study.seeds))
        case CapacityStudy():
            assert (found["boxes"], found["seconds"]) == (list(study.boxes), study.seconds)
            assert (found["warm_up"], found["requests"]) == (study.warm_up, study.requests)
            assert len(found["rows"]) == len(study.boxes) * len(study.policies)
        case ScaleStudy():
            keys = ("boxes", "seconds", "cells", "routers_per_cell", "processes")
            assert [tuple(row[key] for key in keys) for row in found["rows"]] == [
                (run.boxes, run.seconds, run.cells, run.routers, run.processes) for run in study.runs
            ]
        case AccuracyStudy():
            cells = study.cells
            assert [(cell["boxes"], cell["rate_per_box"], cell["policy"]) for cell in found["cells"]] == [
                (boxes, rate, policy.name)
                for boxes in cells.boxes
                for rate in cells.rates
                for policy in cells.policies
            ]


def test_a_cell_states_only_its_differences_and_other_seeds_replace_those_of_the_file(tmp_path: Path) -> None:
    cells = {"fast": {"fleet": {"speeds": [1, 2]}}, "bursts": {"load": {"drawn": {"burst": 2}}}}
    study = read_study(written(tmp_path, {**SWEEP, "cells": cells, "seeds": [1, 2]}), [7])
    assert isinstance(study, SweepStudy)
    fast, bursts = study.cells["fast"], study.cells["bursts"]
    assert fast.fleet.scenario().speeds == (1.0, 2.0, 1.0, 2.0)
    assert (fast.load, bursts.fleet) == (study.load, study.fleet)
    assert (bursts.load.rate_per_box, bursts.load.drawn.burst) == (10, 2)
    assert study.seeds == (7,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"study": ["sweep"]},
            "study: should be one of sweep, capacity, scale, accuracy, kinds, autoscaling, storms, fairness",
        ),
        ({"sweeps": [{}]}, "no axis; give values of rate_per_box, choices, policy"),
        ({"sweeps": [{"policy": ["tandem"]}]}, "should be one of ROUND_ROBIN, LEAST_CONNECTIONS"),
        ({"load": {"rate_per_box": 10, "seconds": 3, "warm_up": 3}}, "warm_up=3: should be below seconds=3"),
        ({"load": {"rate_per_box": 10}}, "load.seconds: missing; add it"),
        ({"cells": {"a": {"load": {"rate": 3}}}}, "unknown key"),
        ({"cells": {"a": 3}}, "cells.a"),
        (
            {"load": {**SWEEP["load"], "streams": {"a": {**STREAM, "kind": "embed"}}}},
            "simulated boxes have an LLM only",
        ),
        (
            {"load": {**SWEEP["load"], "streams": {"a": STREAM}, "drawn": {"burst": 2}}},
            "drawn, conversations and streams exclude each other",
        ),
        (
            {"load": {**SWEEP["load"], "names_prefixes": False}},
            "names_prefixes: concerns prefixes of streams",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, ConfigError)) as caught:
        read_study(written(tmp_path, SWEEP | changes))
    assert message in str(caught.value)


def test_a_study_of_one_seed_refuses_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        read_study(ROOT / "configs/bench/fleet-scale.yaml", [1, 2])
