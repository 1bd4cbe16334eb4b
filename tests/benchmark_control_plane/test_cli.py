"""Tests of `tandem bench`: report, compare and gate, and their exit status."""

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli import main as tandem
from tests import experiments
from tests.benchmark_control_plane.bench_command import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "a", experiments.results(loads=(1.0,)))


def written(folder: Path, content: Any) -> Path:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    records = (json.dumps(record) + "\n" for record in experiments.requests(content))
    (folder / "requests.jsonl").write_text("".join(records))
    return folder


def test_tandem_finds_the_command_through_its_entry_point(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
    entries = {
        group: [EntryPoint(name, value, group) for name, value in values.items()]
        for group, values in declared.items()
    }
    monkeypatch.setattr("controlplane.cli.entry_points", lambda *, group: entries[group])
    assert tandem(["bench", "report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"


def test_report_writes_the_page_next_to_the_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(folder)]) == 0
    page = folder / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_report_of_a_single_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps(experiments.results(loads=(1.0,))))
    assert main(["bench", "report", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'load.html'}\n"
    page = (tmp_path / "load.html").read_text(encoding="utf-8")
    assert "Latency of delivered requests, interactive" in page and 'data-chart="distribution"' not in page


def test_truncated_last_line_is_ignored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "requests.jsonl").open("a") as file:
        file.write('{"run": 0, "id"')
    assert main(["bench", "report", str(folder)]) == 0
    with (folder / "requests.jsonl").open("a") as file:
        file.write("\n")
    assert main(["bench", "report", str(folder)]) == 2
    assert "requests.jsonl:1081: not JSON" in capsys.readouterr().err


def test_compare_exits_with_1_for_a_regression(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = experiments.results(loads=(1.0,))
    for run in worse["runs"]:
        run["goodput_rps"] *= 0.5
    other = written(tmp_path / "b", worse)
    assert main(["bench", "compare", str(folder), str(folder)]) == 0
    assert main(["bench", "compare", str(folder), str(other / "results.json")]) == 1
    assert capsys.readouterr().out.count("WORSE") == len(experiments.SYSTEMS)


def test_gate_prints_a_line_for_each_broken_bound(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = tmp_path / "bounds.yaml"
    bounds.write_text("bounds:\n- {metric: goodput_rps, system: tandem, min: 1}\n")
    assert main(["bench", "gate", str(folder), str(bounds)]) == 0
    bounds.write_text("bounds:\n- {metric: goodput_rps, min: 1000}\n")
    capsys.readouterr()
    assert main(["bench", "gate", str(folder), str(bounds)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == len(experiments.SYSTEMS)


@pytest.mark.parametrize(
    "action", [["report", "{}"], ["compare", "{}", "{}"], ["gate", "{}", "configs/bench/gate-example.yaml"]]
)
def test_missing_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    assert main(["bench", *(part.format(tmp_path / "none") for part in action)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(tmp_path / "none") in err


def test_report_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(folder), "--json"]) == 0
    [page] = json.loads(capsys.readouterr().out)["reports"]
    assert "<html" in Path(page).read_text(encoding="utf-8")


def test_compare_and_gate_as_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", str(folder), str(folder), "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["unpaired"] == 0
    assert {change["is_worse"] for change in comparison["changes"]} == {False}
    bounds = tmp_path / "bounds.yaml"
    bounds.write_text("bounds:\n- {metric: goodput_rps, min: 1000}\n")
    assert main(["bench", "gate", str(folder), str(bounds), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["bounds"], len(verdict["broken"])) == (1, len(experiments.SYSTEMS))


@pytest.mark.parametrize(
    "words", [["replay"], ["tune", "configs/dev.yaml", "--out", "b.yaml"], ["bench", "report"]]
)
def test_a_missing_file_is_named_with_the_remedy(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    at = 2 if words[0] == "bench" else 1
    assert main([*words[:at], str(missing), *words[at:]]) == 2
    assert f"{missing}: No such file or directory; " in capsys.readouterr().err
