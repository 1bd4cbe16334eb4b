import json

from benchmark_control_plane import hybrid_cost
from benchmark_control_plane.kept import PUBLISHED


def test_kept_results_name_device_copy_and_forms():
    kept = sorted(PUBLISHED.glob("hybrid-cost-*.json"))
    assert kept, "python -m benchmark_control_plane.hybrid_cost"
    for path in kept:
        found = json.loads(path.read_text(encoding="utf-8"))
        shape = hybrid_cost.SHAPES[found["model"]]
        assert found["device"] and found["copy_gb_s"] > 0
        assert set(found["forms"]) == set(hybrid_cost.MOVED) - ({"m2"} if shape.rotary else set())
        for row in found["forms"].values():
            assert 0 < row["share_of_copy"] < 1
            assert len(row["layer_ms"]) == len(found["contexts"])
