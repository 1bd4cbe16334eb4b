"""Tests of results files, which are replaced only by complete results."""

import argparse
import json
from pathlib import Path

import pytest

from benchmark_control_plane.common.results_file import add_results, read_previous, write_json, write_or_print


def test_file_is_replaced_completely_or_not_at_all(tmp_path: Path):
    file = tmp_path / "figures.json"
    write_json(file, {"rate": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(file, {"rate": object()})
    assert json.loads(file.read_text()) == {"rate": 1}
    write_json(file, {"rate": 2})
    assert json.loads(file.read_text()) == {"rate": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_open_file_keeps_the_old_results(tmp_path: Path):
    file = tmp_path / "figures.json"
    write_json(file, ["old"] * 10_000)
    with file.open() as reader:
        start = reader.read(100)
        write_json(file, ["new"])
        assert json.loads(start + reader.read()) == ["old"] * 10_000


def test_results_are_printed_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_results(parser)
    write_or_print(parser.parse_args([]).results, {"rate": 1})
    assert json.loads(capsys.readouterr().out) == {"rate": 1}
    assert read_previous(None) == read_previous(tmp_path / "new.json") == {}
    named = parser.parse_args(["--results", str(tmp_path / "new.json")]).results
    write_or_print(named, {"rate": 2})
    assert (capsys.readouterr().out, read_previous(named)) == ("", {"rate": 2})


def test_no_command_has_a_default_results_file():
    folder = Path(__file__).parents[3] / "benchmark_control_plane"
    stated = {file.name for file in folder.rglob("*.py") if '"--results"' in file.read_text(encoding="utf-8")}
    assert stated == {"results_file.py", "reproduce.py"}
