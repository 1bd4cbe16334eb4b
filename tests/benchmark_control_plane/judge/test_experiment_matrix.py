"""Cells of a matrix: names, differences, mistakes, and a whole run."""

import json

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.experiments.results_page import matrix_table
from benchmark_control_plane.judge.experiment_matrix import read_cells
from benchmark_control_plane.report.matrix_results import matrix_cells
from tests.benchmark_control_plane.bench_command import main
from tests.benchmark_control_plane.judge.test_run_experiment import EXPERIMENT

MATRIX = {
    "mix": {"3:1": {}, "1:1": {"streams": {"chat": {"share": 1}}}},
    "outputs": {"short": {}, "fixed": {"streams": {"chat": {"output_tokens": {"preset": "mid"}}}}},
}


def file(tmp_path, **changes):
    path = tmp_path / "small-matrix.yaml"
    path.write_text(
        yaml.safe_dump({**EXPERIMENT, "matrix": MATRIX, **changes}, sort_keys=False), encoding="utf-8"
    )
    return path


def test_each_value_makes_one_cell_around_the_first_values(tmp_path):
    cells = read_cells(file(tmp_path), tmp_path)
    assert list(cells) == ["mix 3:1", "mix 1:1", "outputs fixed"]
    shares = [cell.plan.streams["chat"].share for cell in cells.values()]
    presets = [cell.plan.streams["chat"].output_tokens.preset for cell in cells.values()]
    assert shares == [3, 1, 3] and presets == ["short", "short", "mid"]
    assert cells["mix 1:1"].plan.name == "small: mix 1:1"
    # The text of a cell is an experiment of its own.
    alone = tmp_path / "cell.yaml"
    alone.write_text(cells["mix 1:1"].text, encoding="utf-8")
    assert read_cells(alone, tmp_path)[""].plan == cells["mix 1:1"].plan


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ({}, "matrix: should be a mapping of at least one axis"),
        ({"mix": {}}, "matrix.mix: should be a mapping of at least one value"),
        ({"mix": {1: {}}}, "matrix.mix.1: give a text in quotes"),
        ({"mix": {"a": {}, "b": {"loads": []}}}, "mix b"),
    ],
)
def test_a_mistake_is_named(tmp_path, matrix, message):
    with pytest.raises(BadInput, match=message):
        read_cells(file(tmp_path, matrix=matrix), tmp_path)


@pytest.mark.long
def test_a_matrix_writes_a_report_for_each_cell_and_one_file_of_all(tmp_path):
    out = tmp_path / "out"
    assert main(["bench", "run", str(file(tmp_path)), "--quick", "--out", str(out)]) == 0
    content = json.loads((out / "matrix.json").read_text(encoding="utf-8"))
    cells = matrix_cells(content, "matrix.json")
    assert content["name"] == "small-matrix" and list(cells) == ["mix 3:1", "mix 1:1", "outputs fixed"]
    assert all((out / folder / "report.html").exists() for folder in ("mix-3-1", "mix-1-1", "outputs-fixed"))
    table = matrix_table.full(cells, "link")
    rows = [line for line in table.splitlines() if line.startswith("| ") and "%" in line]
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| mix 3:1", "| mix 1:1", "| outputs fixed"]
    assert all(len(row.split(" | ")) == len(rows[0].split(" | ")) for row in rows)
