"""A fleet that does not fit on the machine is refused, without a cluster."""

from pathlib import Path
from typing import Any

import pytest

from controlplane.config import ConfigError
from controlplane.config.fleet_file import parse_fleet
from controlplane.fleet_on_ray.local_cluster import Fleet, _reloaded, require_room

MACHINE = {"GPU": 4.0, "CPU": 16.0, "memory": 1e11}


def fleet(folder: Path, **search: Any) -> Fleet:
    """Two boxes of two GPUs and four cores, and one of another kind."""
    (folder / "box.yaml").write_text("models: {chat: {model: some-model}}\n", encoding="utf-8")
    (folder / "search.yaml").write_text("models: {embeddings: [{model: some-encoder}]}\n", encoding="utf-8")
    kinds = {
        "both": {"config": "box.yaml", "boxes": 2, "gpus": 2, "cpus": 4},
        "search": {"config": "search.yaml", "boxes": 1, "gpus": 0, "cpus": 8, **search},
    }
    return parse_fleet({"kinds": kinds}, source="my-fleet.yaml", folder=folder)


def test_boxes_that_fill_the_machine_are_served(tmp_path: Path) -> None:
    require_room(fleet(tmp_path)[0], MACHINE)
    require_room(fleet(tmp_path, autoscale={"max_boxes": 50})[0], MACHINE)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"boxes": 8, "gpus": 1}, "the boxes need 12 GPUs and this machine has 4; lower boxes or gpus"),
        ({"cpus": 8.5}, "the boxes need 16.5 cores and this machine has 16; lower boxes or cpus"),
    ],
)
def test_boxes_for_which_ray_would_wait_without_end_are_refused(
    tmp_path: Path, search: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_room(fleet(tmp_path, **search)[0], MACHINE)
    with pytest.raises(ConfigError, match="this machine has 0"):
        require_room(fleet(tmp_path, **search)[0], {})


def test_a_change_that_does_not_fit_leaves_the_fleet_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = fleet(tmp_path)
    found = _reloaded(former, lambda: fleet(tmp_path, boxes=3), "key", 8000, MACHINE)
    assert found is former
    assert "need 32 cores and this machine has 16; lower boxes or cpus; nothing was changed" in (
        capsys.readouterr().err
    )
