"""`python -m benchmark_control_plane.replay` prints JSON, or one error line with exit status 2."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark_control_plane.replay import main
from benchmark_control_plane.round_model.workloads import conversation_lengths, poisson_arrivals

ONE = {"a": 0, "s": 1, "o": 3}
GOOD: dict[str, Any] = {"M": 5, "requests": [{"a": 0, "s": 1, "o": 1}, {"a": 0, "s": 1, "o": 1}, ONE, ONE]}


def written(folder: Path, content: object) -> str:
    path = folder / "instance.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return str(err)


def test_prints_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, GOOD), "--policy", "mc-sf"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "policy": "mc-sf",
        "total_latency": 13,
        "mean_latency": 3.25,
        "start": [0, 0, 1, 4],
        "finish": [1, 1, 4, 7],
        "max_usage": 4,
        "clears": 0,
        "rounds": 7,
    }


def test_time_model_sets_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"M": 5, "requests": [ONE]})
    assert main([path, "--policy", "mc-sf", "--time", "affine:0.5,0.25,0,0"]) == 0
    assert json.loads(capsys.readouterr().out)["finish"] == [1.75]


def test_no_requests_give_an_empty_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, {"M": 5, "requests": []}), "--policy", "tandem"]) == 0
    assert json.loads(capsys.readouterr().out)["start"] == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"M": 5, "requests": [{"a": 0, "s": 2, "o": 4}]}, "s + o = 6 exceeds M=5"),
        ({"M": 5, "requests": [{"a": 0, "s": -1, "o": 4}]}, "requests[0].s=-1"),
        ({"M": 5, "requests": [{"a": 0, "s": 1, "o": -4}]}, "requests[0].o=-4"),
        ({"M": 5, "requests": [{"a": -1, "s": 1, "o": 1}]}, "requests[0].a=-1"),
        ({"M": 5, "requests": [{"a": 0, "s": 1, "o": 1, "pred": 0}]}, "requests[0].pred=0"),
        ({"M": 5, "requests": [{"a": 0, "s": 1, "o": 1, "pred": None}]}, "requests[0].pred=None"),
        ({"M": 5, "requests": [{"a": 0, "s": 1}]}, "requests[0].o"),
        ({"M": 5, "requests": [7]}, "requests[0]=7"),
        ({"M": 5}, "requests: a list"),
        ({"requests": []}, "M=None"),
        ([], "object"),
        ("{", "not JSON"),
    ],
)
def test_bad_instances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, says: str
) -> None:
    assert says in refused(capsys, written(tmp_path, content), "--policy", "mc-sf")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "sooner"], "choose one of"),
        (["--policy", "mc-sf", "--alpha", "1"], "alpha=1.0"),
        (["--policy", "mc-sf", "--alpha", "nan"], "alpha=nan"),
        (["--policy", "mc-sf", "--alpha", "some"], "--alpha"),
        (["--policy", "alpha-beta"], "beta=0.0"),
        (["--policy", "mc-sf", "--time", "tile:1,2"], "--time tile:1,2"),
        (["--policy", "mc-sf", "--time", "tile:0,0,0,0"], "a must be above 0"),
        (["--policy", "mc-sf", "--time", "stone:1,2,3,4"], "give unit"),
        ([], "--policy"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert says in refused(capsys, written(tmp_path, GOOD), *options)


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.json" in refused(capsys, str(tmp_path / "none.json"), "--policy", "mc-sf")


def test_policy_without_progress_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"a": 0, "s": 1, "o": 8}
    path = written(tmp_path, {"M": 10, "requests": [long, long]})
    assert "no request finished" in refused(capsys, path, "--policy", "alpha-protection")
    assert main([path, "--policy", "alpha-beta", "--beta", "0.5"]) == 0


@pytest.mark.long
def test_same_seed_gives_the_same_trace_in_every_process(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    listed = poisson_arrivals(rng, conversation_lengths(rng, 120), 50)
    requests = [{"a": one.arrival, "s": one.prompt, "o": one.output, "pred": 40} for one in listed]
    path = written(tmp_path, {"M": 3000, "requests": requests})

    def traces(hash_seed: str) -> set[str]:
        found = set()
        for policy in ("tandem", "alpha-beta", "mc-sf-skip"):
            command = [sys.executable, "-m", "benchmark_control_plane.replay", path, "--policy", policy]
            command += ["--alpha=0.1", "--beta=0.2", "--seed=3", "--time=tile:0.0926,0.0002,0.048,2.5e-7"]
            printed = subprocess.run(
                command,
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                check=True,
            ).stdout
            found.add(hashlib.sha256(printed).hexdigest())
        return found

    first = traces("1")
    assert len(first) == 3
    assert first == traces("2")
