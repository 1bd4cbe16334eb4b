"""No simulated system exceeds the bound in hindsight on the committed experiments, at a reduced size."""

import json
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.judge.run_experiment import run_experiment

FOLDER = Path("configs/bench")
SIMULATED = ["load", "simulated-mix-memory", "simulated-mix-prefill", "tpot", "workflow"]
OTHERS = [
    "admission",
    "burstiness",
    "eviction",
    "forecast",
    "memory-pressure",
    "ordering",
    "quota",
    "scaling",
    "simulated-mix-compute",
    "simulated-mix-light",
]
SIZE = {
    "window": {"warmup_s": 1, "measured_s": 2, "drain_s": 20},
    "frontier": {"targets": [], "steps": 0},
    "seeds": [7],
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*SIMULATED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_no_system_exceeds_the_bound(name, tmp_path):
    base = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for file in FOLDER.glob("*.yaml"):
        (tmp_path / file.name).symlink_to(file.resolve())
    reduced = base | {
        key: base.get(key, {}) | value if isinstance(value, dict) else value for key, value in SIZE.items()
    }
    path = tmp_path / "reduced.yaml"
    path.write_text(yaml.safe_dump(reduced), encoding="utf-8")
    assert run_experiment(path, tmp_path / "out", is_quick=True) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert results["runs"]
    for run in results["runs"]:
        bound = run["bound"]
        assert run["attainment"]["overall"] <= bound["attainment"]
        assert bound["feasible"] <= bound["attainment"]
