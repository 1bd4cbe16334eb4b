"""The measurement of a load report's cost refuses too few calls."""

import pytest

from benchmark_control_plane.experiments.fleet import report_cost


def test_impossible_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_cost.main(["--calls", "1"]) != 0
    assert "--calls 1: must be at least 10" in capsys.readouterr().err
