"""The files of a running experiment."""

import json
from pathlib import Path

import pytest

from benchmark_control_plane.judge import results
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.results import ResultsWriter

LOAD = Path(__file__).parents[3] / "configs/bench/load.yaml"


@pytest.fixture
def writer(tmp_path):
    return ResultsWriter(read_experiment(LOAD, tmp_path), tmp_path / "out")


def content(tmp_path):
    text = (tmp_path / "out" / "results.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    return json.loads(text)


def test_file_is_whole_and_laid_out_alike_after_every_run(writer, tmp_path):
    assert content(tmp_path)["runs"] == []
    entries = [{"system": 'a "b"\nc', "memory": {"times_s": [0.5, 1.0], "none": None}, "empty": []}, {}]
    for count, entry in enumerate(entries, start=1):
        writer.add(entry, ())
        assert content(tmp_path)["runs"] == entries[:count]
    writer.measure({"chat": {"ttft_ms": 1.5}}, {}, 20.0)
    writer.finish()
    found = content(tmp_path)
    assert (found["runs"], found["capacity_rps"], found["partial"]) == (entries, 20.0, False)


def test_a_run_is_encoded_once(writer, monkeypatch):
    encoded = []
    dumps = json.dumps

    def record(value, **options):
        encoded.append(value)
        return dumps(value, **options)

    monkeypatch.setattr(results.json, "dumps", record)
    first = {"system": "first"}
    for entry in (first, {"system": "second"}, {"system": "third"}):
        writer.add(entry, ())
    assert encoded.count(first) == 1
    assert not any(first in value for value in encoded if isinstance(value, list))
    assert not any(value.get("runs") for value in encoded if isinstance(value, dict))


def test_a_number_that_json_lacks_is_refused(writer):
    with pytest.raises(ValueError, match="JSON"):
        writer.add({"attainment": float("nan")}, ())
