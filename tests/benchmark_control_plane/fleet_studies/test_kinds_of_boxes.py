"""The boxes and demands of the comparison of mixed and dedicated boxes."""

import json
from pathlib import Path

import pytest

from benchmark_control_plane.capacity.box_kinds import serves
from benchmark_control_plane.capacity.workload_source import read_workload
from benchmark_control_plane.fleet_studies import kinds_of_boxes
from controlplane.config.fleet_file import parse_fleet
from controlplane.service.preflight import plan_of


@pytest.mark.parametrize("fleet", kinds_of_boxes._FLEETS)
def test_the_kinds_of_each_fleet_serve_all_parts_of_the_demands(fleet: str, tmp_path: Path) -> None:
    kinds_of_boxes._write_boxes(tmp_path)
    stated = {kind: {"config": f"{kind}.yaml"} for kind in kinds_of_boxes._FLEETS[fleet]}
    _, files = parse_fleet({"kinds": stated}, source="fleet.yaml", folder=tmp_path)
    configs = [file.config for file in files.values()]
    for part in ("interactive/llm", "retrieval/embedding", "batch/embedding"):
        assert any(serves(config, part) for config in configs)
    assert all(plan_of(config).pool_bytes > 0 for config in configs)


def test_the_demand_has_the_stated_share_of_documents() -> None:
    streams = read_workload(json.dumps(kinds_of_boxes._streams(0.25)))
    assert {name: stream.share for name, stream in streams.items()} == {"chat": 0.75, "indexing": 0.25}
