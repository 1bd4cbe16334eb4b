"""A whole experiment on real engines: vLLM with the embedding server, and Tandem."""

import json
from pathlib import Path

import pytest
import yaml

from tests.benchmark_control_plane.bench_command import main

MIX = Path(__file__).parents[3] / "configs" / "bench" / "mix-compute.yaml"


@pytest.mark.engine
@pytest.mark.slow
def test_both_systems_are_started_and_measured(tmp_path):
    content = yaml.safe_load(MIX.read_text(encoding="utf-8"))
    content |= {
        "loads": [1.0],
        "capacity": {"rps": 4},
        "window": {"warmup_s": 0.5, "measured_s": 4, "drain_s": 30, "lateness_limit_ms": 60_000},
        "together": 2,
    }
    for stream in ("chat", "jobs"):
        content["streams"][stream]["output_tokens"] = {"between": [8, 32]}
    # Processors without bfloat16 instructions take several times as long for it.
    content["live"]["chat"]["engine"]["dtype"] = "float32"
    # In the idle class the embedding workers would wait for whatever else runs on the cores.
    content["live"]["embedding"]["idle_cpu_priority"] = False
    for system in content["systems"]:
        if "split" in system:
            system["split"]["embedder"]["idle"] = False
    path = tmp_path / "live.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert main(["bench", "run", str(path), "--out", str(tmp_path / "out"), "--quick"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert not results["partial"]
    assert set(results["unloaded_ms"]) == {"interactive", "documents", "batch"}
    for entry in results["runs"]:
        assert entry["rates"]["fail"] == 0
        assert entry["memory"]["by_owner"]["llm"]
    tandem, plain = results["runs"]
    assert set(tandem["memory"]["by_owner"]) == {"embedding", "llm"}
    assert tandem["engine"]["recompute_tokens"] is not None and tandem["engine"]["cache_hit"] is not None
    assert tandem["decisions"]["admit"] > 0 and plain["decisions"] is None
    lines = (tmp_path / "out" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [r for r in map(json.loads, lines) if r["outcome"] in ("MET", "LATE") and r["kind"] == "generate"]
    assert kept and all(1 <= len(r["token_s"]) <= r["output_tokens"] for r in kept)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
