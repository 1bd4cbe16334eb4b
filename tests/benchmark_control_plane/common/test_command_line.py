"""Commands without their data fail early, with one line and exit status 2."""

import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("by", ["--data", "TANDEM_DATA"])
@pytest.mark.parametrize(
    "name",
    [
        "engine.frontier",
        "hidden_cache.attainment",
        "prediction.output_length",
        "prediction.goodput",
        "prediction.train_prior",
    ],
)
def test_absent_data_is_reported_in_one_line(
    name: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = f"benchmark_control_plane.experiments.{name}"
    # The option takes precedence over the environment variable.
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path / "elsewhere" if by == "--data" else tmp_path))
    monkeypatch.setattr(sys, "argv", [module, "--data", str(tmp_path)] if by == "--data" else [module])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(str(tmp_path))
    assert "elsewhere" not in err
