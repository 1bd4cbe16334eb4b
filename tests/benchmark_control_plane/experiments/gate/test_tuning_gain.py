"""The experiments on `tandem tune` call the command."""

import pytest

from benchmark_control_plane.experiments.gate.tuning_gain import tuned
from controlplane.commands.exit_status import ExitStatus


def test_the_status_of_the_command_ends_the_experiment(tmp_path, capsys):
    config = tmp_path / "my.yaml"
    config.write_text("models: {chat: {model: simulated}}\n")
    with pytest.raises(SystemExit) as ended:
        tuned(tmp_path / "no-log", config, tmp_path / "better.yaml", minutes=1, processes=1)
    assert ended.value.code == ExitStatus.BAD_INPUT
    assert "no-log" in capsys.readouterr().err
