"""vLLM's own server with only Tandem's scheduler: `vllm serve MODEL --scheduler-cls …`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from backends import bundled_models
from backends.vllm.plugin.shared_state import ENVIRONMENT, SharedState
from benchmark_control_plane.common.servers import Server, free_port, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_vllms_own_server_runs_tandems_scheduler_with_its_metadata(tmp_path, monkeypatch):
    shared_state = SharedState.create(tmp_path / "state")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "state"))
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", bundled_models.resolve("tandem/tiny-llama"),
        "--served-model-name", "tiny", "--port", str(port), "--enforce-eager", "--max-model-len", "256",
        "--block-size", "32", "--num-gpu-blocks-override", "13", "--kv-cache-memory-bytes", "16777216",
        "--scheduler-cls", "backends.vllm.scheduler.make",
        "--additional-config", json.dumps({"tandem": {"ordering": "srmt", "default": {"ttft_ms": 2_000}}}),
    ]  # fmt: skip

    def ask(number: int) -> int:
        body = {"model": "tiny", "prompt": "x " * (number + 1), "max_tokens": 200, "ignore_eos": True}
        # One request has full metadata, one invalid metadata, the others none.
        metadata = {
            0: {"tandem_priority": 3, "tandem_ttft_ms": 100, "tandem_tokens": 200},
            1: {"tandem_speed": 9},
        }
        if number in metadata:
            body["vllm_xargs"] = metadata[number]
        response = http.post("/v1/completions", json=body)
        return response.json()["usage"]["completion_tokens"]

    with serving(Server("vllm", command, port, "/health"), tmp_path / "log") as server:
        # One shared client: creating one takes longer than a request, and all requests must be concurrent.
        with httpx.Client(base_url=server.url, timeout=120) as http, ThreadPoolExecutor(8) as clients:
            assert list(clients.map(ask, range(8))) == [200] * 8
        reading = shared_state.read()
    # 8 requests of 7 blocks in a pool of 12.
    assert reading is not None
    assert reading.facts.total == reading.facts.quota == reading.facts.use_ceiling == 12
    assert reading.facts.preemptions > 0
