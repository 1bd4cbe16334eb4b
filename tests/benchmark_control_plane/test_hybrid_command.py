"""`python -m benchmark_control_plane.hybrid` prints JSON, or one error line with exit status 2."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_control_plane.hybrid import main

GOOD: dict[str, Any] = {"M": 26, "rho": 0.004274, "n_total": 3, "p": [1.59], "m": [31]}


def written(folder: Path, content: object) -> str:
    path = folder / "candidates.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, GOOD)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"x": [1], "y": [1], "value": pytest.approx(1.192518), "memory": 15.5}


def test_ratio_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, {**GOOD, "h": 0.25})]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == 7.75


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"p": [1.0, 2.0]}, "p has 2 entries and m 1"),
        ({"p": [-1.0]}, "p[0]=-1.0"),
        ({"m": [0]}, "m[0]=0.0"),
        ({"m": ["3"]}, "m[0]='3'"),
        ({"p": [True]}, "p[0]=True"),
        ({"p": 3}, "p: a list"),
        ({"M": float("nan")}, "M=nan"),
        ({"M": -1}, "M=-1.0"),
        ({"h": 0}, "h=0.0"),
        ({"n_total": 1.5}, "n_total=1.5"),
        ({"rho": None}, "rho=None"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    assert main([written(tmp_path, {**GOOD, **change})]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_file_without_a_json_object_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_key_and_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, {k: v for k, v in GOOD.items() if k != "M"})]) == 2
    assert "M: missing" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
