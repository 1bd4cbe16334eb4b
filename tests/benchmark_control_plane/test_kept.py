"""What was measured before is lost only to something whole."""

import json
from pathlib import Path

import pytest

from benchmark_control_plane.kept import keep


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    file = tmp_path / "figures.json"
    keep(file, {"rate": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        keep(file, {"rate": object()})
    assert json.loads(file.read_text()) == {"rate": 1}
    keep(file, {"rate": 2})
    assert json.loads(file.read_text()) == {"rate": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_has_the_old_figures_to_the_end(tmp_path: Path):
    file = tmp_path / "figures.json"
    keep(file, ["old"] * 10_000)
    with file.open() as reader:
        start = reader.read(100)
        keep(file, ["new"])
        assert json.loads(start + reader.read()) == ["old"] * 10_000
