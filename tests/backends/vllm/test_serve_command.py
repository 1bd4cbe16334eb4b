"""vLLM's own server with Tandem's scheduler and nothing else of it: `vllm serve MODEL --scheduler-cls …`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from backends import bundled_models
from backends.vllm.plugin.shared_state import ENVIRONMENT, SharedState
from benchmark_control_plane.common.servers import Server, free_port, serving

pytestmark = pytest.mark.engine


def test_vllms_own_server_orders_by_tandem_and_takes_its_metadata(tmp_path, monkeypatch):
    board = SharedState.create(tmp_path / "board")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "board"))
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
        # One says all, one what makes no sense, the others nothing.
        said = {
            0: {"tandem_priority": 3, "tandem_ttft_ms": 100, "tandem_tokens": 200},
            1: {"tandem_speed": 9},
        }
        if number in said:
            body["vllm_xargs"] = said[number]
        answer = http.post("/v1/completions", json=body)
        return answer.json()["usage"]["completion_tokens"]

    with serving(Server("vllm", command, port, "/health"), tmp_path / "log") as server:
        # One client for all: to make one takes longer than an answer, and they are to be there at once.
        with httpx.Client(base_url=server.url, timeout=120) as http, ThreadPoolExecutor(8) as clients:
            assert list(clients.map(ask, range(8))) == [200] * 8
        reading = board.read()
    # 8 answers of 7 blocks in a pool of 12.
    assert reading is not None
    assert reading.facts.total == reading.facts.quota == 12
    assert reading.facts.preemptions > 0
