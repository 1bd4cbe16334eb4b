"""The experiment on `tandem tune` calls the command, and judges its answer against files made by hand."""

import pytest
import yaml

from benchmark_control_plane.decision_replay.replayed_requests import RequestResult
from benchmark_control_plane.experiments.gate.tuning_gain import judged, log_of, tuned
from benchmark_control_plane.experiments.results_page import result_rows
from benchmark_control_plane.tuning import evaluation
from benchmark_control_plane.tuning.evaluation import BlockResult
from controlplane.commands.exit_status import ExitStatus


def test_the_status_of_the_command_ends_the_experiment(tmp_path, capsys):
    config = tmp_path / "my.yaml"
    config.write_text("models: {chat: {model: simulated}}\n")
    with pytest.raises(SystemExit) as ended:
        tuned(tmp_path / "no-log", config, tmp_path / "better.yaml", minutes=1, processes=1)
    assert ended.value.code == ExitStatus.BAD_INPUT
    assert "no-log" in capsys.readouterr().err


def ended(block, sections):
    """All requests are met without the guard, of ten nine with it, and half under the bad configuration."""
    is_bad = sections.get("scheduling", {}).get("ordering") == "fcfs"
    every = 2 if is_bad else 10 if sections.get("admission", {}).get("tpot_guard", True) else 1_000
    found = [
        RequestResult("late" if at % every == 1 else "met", 1.0) for at in range(block.last - block.first)
    ]
    return BlockResult(found, 0.01)


@pytest.mark.long
def test_the_best_by_hand_is_compared_with_the_tuned_file(tmp_path, monkeypatch):
    log = log_of(tmp_path, 27.0, 20.0)
    monkeypatch.setattr(evaluation, "replayed", ended)
    found = judged(tmp_path, log, processes=1)
    assert found["best_by_hand"] == "no guard" and found["best_by_hand_less_tuned"] is None
    content = yaml.safe_load((tmp_path / "bad.yaml").read_text())
    (tmp_path / "better.yaml").write_text(yaml.safe_dump({**content, "scheduling": {}, "admission": {}}))
    found = judged(tmp_path, log, processes=1)
    by_hand, better = (found["held_out"][name]["kept"] for name in ("no guard", "tuned"))
    less = found["best_by_hand_less_tuned"]
    assert less["points"] == pytest.approx(by_hand - better, abs=0.02) and less["points"] > 5
    run = {"log_minutes": 60.0, "rate": 20.0, "seconds_of_this_run": 598}
    [(question, result)] = result_rows.tuning_gain({**found, **run})
    assert "a log of 60 minutes at 20 requests/s, 598 s of search" in question
    assert result.endswith(
        f"(no guard); best by hand less tuned +{less['points']:.1f} ± {less['error']:.1f} points"
    )
