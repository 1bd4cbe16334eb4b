"""What `--resume` keeps: runs of the same experiment on the same machine, and nothing else."""

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.results import ResultsWriter
from benchmark_control_plane.judge.run_experiment import run_experiment
from tests.benchmark_control_plane.judge.test_run_experiment import EXPERIMENT, kept


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    return path


@pytest.mark.long
def test_a_finished_experiment_gets_another_load_and_seed(experiment, tmp_path):
    out = tmp_path / "out"
    run_experiment(experiment, out, seeds=[0])
    before, _ = kept(out)
    more = EXPERIMENT | {"loads": [1.0, 0.5, 2.0], "frontier": {"targets": [0.9]}}
    experiment.write_text(yaml.safe_dump(more), encoding="utf-8")
    assert run_experiment(experiment, out, is_resumed=True) == 0
    after, requests = kept(out)
    assert after["runs"][: len(before["runs"])] == before["runs"]
    added = [(r["load"], r["seed"]) for r in after["runs"][len(before["runs"]) :]]
    assert sorted(added) == sorted([(1.0, 0), (0.5, 1), (1.0, 1), (2.0, 1)] * 2)
    assert {r["run"] for r in requests} == set(range(len(after["runs"])))
    assert yaml.safe_load(after["experiment"]["yaml"])["loads"] == more["loads"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"window": {"warmup_s": 1, "measured_s": 6, "drain_s": 30}}, "window differ"),
        ({"slo_scale": 2.0}, "slo_scale differ"),
        ({"systems": [EXPERIMENT["systems"][0] | {"simulated": {"admission": {"max_wait_ms": 1}}},
                      EXPERIMENT["systems"][1]]}, "system 'tandem' differ"),
    ],
)  # fmt: skip
def test_results_of_another_experiment_are_not_continued(experiment, tmp_path, changed, named):
    writer = ResultsWriter(read_experiment(experiment, tmp_path), tmp_path / "out")
    writer.measure({}, {}, 20.0)
    experiment.write_text(yaml.safe_dump(EXPERIMENT | changed), encoding="utf-8")
    with pytest.raises(BadInput, match=named):
        run_experiment(experiment, tmp_path / "out", is_resumed=True)


def test_results_of_another_machine_are_not_continued(experiment, tmp_path, monkeypatch):
    writer = ResultsWriter(read_experiment(experiment, tmp_path), tmp_path / "out")
    writer.measure({}, {}, 20.0)
    monkeypatch.setattr("platform.python_version", lambda: "2.7")
    with pytest.raises(BadInput, match=r"another environment \(python\); leave out --resume"):
        run_experiment(experiment, tmp_path / "out", is_resumed=True)


def test_results_name_each_commit_once(experiment, tmp_path, monkeypatch):
    plan, out = read_experiment(experiment, tmp_path), tmp_path / "out"
    ResultsWriter(plan, out).measure({}, {}, 20.0)
    first = kept(out)[0]["environment"]["commit"]
    monkeypatch.setattr("benchmark_control_plane.judge.results._commit", lambda: "abc")
    for _ in range(2):
        ResultsWriter(plan, out, is_resumed=True)
        assert kept(out)[0]["environment"]["commit"] == f"{first}; continued at abc"


def test_a_quick_run_is_not_resumed(experiment, tmp_path):
    with pytest.raises(BadInput, match="leave out --quick"):
        run_experiment(experiment, tmp_path / "out", is_quick=True, is_resumed=True)
