"""Studies run through `tandem bench run`, in the rows and with the figures of the committed results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark_control_plane.fleet_studies.study_file import SweepStudy
from benchmark_control_plane.fleet_studies.study_reader import read_study
from benchmark_control_plane.fleet_studies.sweeps import planned_rows, sweep
from controlplane.cli import main
from tests.benchmark_control_plane.fleet_studies.test_study_file import (
    FILES,
    RESULTS,
    ROOT,
    SWEEP,
    WITH_RESULTS,
    written,
)

SWEEPS = [path for path in WITH_RESULTS if isinstance(read_study(path), SweepStudy)]
# Recorded arrivals have tests of their own.
DRAWN = [path for path in FILES if path.stem not in ("fleet-traces", "fleet-autoscaling")]
TRACE = "timestamp,prompt,output\n" + "".join(f"{at / 5},{50 + at % 7},{5 + at % 3}\n" for at in range(50))


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a study, or the cells of one that compares two models."""
    [rows] = [found[name] for name in ("rows", "cells") if name in found]
    return list(rows)


def run(file: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["bench", "run", str(file), "--out", str(out), *options]) == 0
    [written_file] = out.glob("*.json")
    found: dict[str, Any] = json.loads(written_file.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_rows_of_a_committed_sweep_are_those_of_its_results(path: Path) -> None:
    study = read_study(path)
    assert isinstance(study, SweepStudy)
    labels = [dict(row.label) for row in planned_rows(study)]
    rows = committed(path.stem)["rows"]
    assert [{key: row[key] for key in label} for row, label in zip(rows, labels, strict=True)] == labels
    assert all(len(row) - len(labels[0]) - ("cached_percent" in row) == 6 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_committed_study_runs_reduced(path: Path, tmp_path: Path) -> None:
    rows = rows_of(run(path, tmp_path / "out", "--quick"))
    assert rows
    if path in WITH_RESULTS:
        figures = [set(row) for row in rows_of(committed(path.stem))]
        assert all(set(row) in figures for row in rows)
    assert all(0 <= row[name] <= 100 for row in rows for name in row if name.endswith("met_percent"))
    assert all(1 <= row["rate_per_box"] <= 100 for row in rows if "rate_per_box" in row)


@pytest.mark.long
def test_recorded_arrivals_are_replayed_at_the_rate_of_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    columns = {"at": "timestamp", "prompt": "prompt", "output": "output"}
    stream = {
        "kind": "generate",
        "service_class": "chat",
        "share": 1,
        "trace": {"file": "trace.csv", "columns": columns},
        "shared_prefix": {"groups": 3, "tokens": 16},
    }
    study = {**SWEEP, "load": {**SWEEP["load"], "streams": {"chat": stream}}, "seeds": [1, 2]}
    found = run(written(tmp_path, study), tmp_path / "out", "--data", str(tmp_path))
    assert [row["policy"] for row in found["rows"]] == ["TANDEM", "RANDOM"]
    assert all(row["met_percent"] == 100 and row["ttft_p50_ms"] > 0 for row in found["rows"])
    assert main(["bench", "run", str(tmp_path / "mine.yaml"), "--out", str(tmp_path), "--data", "none"]) == 2


@pytest.mark.long
def test_equal_seeds_give_the_committed_figures() -> None:
    """One cell of a committed sweep at its full size."""
    study = read_study(ROOT / "configs/bench/fleet-retries.yaml")
    assert isinstance(study, SweepStudy)
    [row, *_] = committed("fleet-retries")["rows"]
    one = {"rate_per_box": (row["rate_per_box"],), "retries": (row["retries"],)}
    found = sweep(replace(study, sweeps=(replace(study.sweeps[0], **one),)), ROOT)
    assert found["rows"] == [row]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweeps": [{"boxes_down": [5]}]}, "boxes_down=5: should be at most boxes=4"),
        ({"sweeps": [{"router_lost": [True], "routers": [1]}]}, "one of at least two routers"),
        ({"fleet": {"boxes": 100}, "sweeps": [{"choices": [65]}]}, "choices=65: from 2 to 64, or all boxes"),
    ],
)
def test_values_that_do_not_agree_end_the_command(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, SWEEP | changes)
    assert main(["bench", "run", str(file), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
