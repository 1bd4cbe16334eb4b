"""Committed costs of the cache forms name device, copy bandwidth and forms."""

import json

from benchmark_control_plane.common.results_file import PUBLISHED
from benchmark_control_plane.experiments.hidden_cache import decode_cost


def test_committed_results_name_device_copy_and_forms():
    committed = sorted(PUBLISHED.glob("hybrid-cost-*.json"))
    assert committed, "python -m benchmark_control_plane.experiments.hidden_cache.decode_cost"
    for path in committed:
        found = json.loads(path.read_text(encoding="utf-8"))
        shape = decode_cost.SHAPES[found["model"]]
        assert found["device"] and found["copy_gb_s"] > 0
        assert set(found["forms"]) == set(decode_cost.MOVED) - ({"m2"} if shape.rotary else set())
        for row in found["forms"].values():
            assert 0 < row["share_of_copy"] < 1
            assert len(row["layer_ms"]) == len(found["contexts"])
