"""Tests of the command lines and configurations with which systems are started."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.vllm.hybrid import support
from benchmark_control_plane.common.servers import Server
from benchmark_control_plane.judge import systems
from benchmark_control_plane.judge.experiment_file import first_variant, read_experiment
from benchmark_control_plane.judge.system_schema import Pinned, QueueLimits, Split, SystemSection
from benchmark_control_plane.judge.systems import (
    embedding_server,
    running_system,
    tandem_config,
    vllm_arguments,
)
from controlplane.config import parse
from controlplane.service.memory.memory_plan import ModelFacts, memory_plan

FOLDER = Path(__file__).parents[3] / "configs" / "bench"
GIB = 2**30
# Content of config.json, and the approximate size of the weight files.
FACTS = {
    "Qwen/Qwen2.5-7B-Instruct": ModelFacts(
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3_584,
            "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 32_768,
            "torch_dtype": "bfloat16",
        },
        15_231_233_024,
    ),
    "BAAI/bge-m3": ModelFacts({"model_type": "xlm-roberta", "hidden_size": 1_024}, 2_271_064_456),
}  # fmt: skip


@pytest.fixture
def on_a_gpu():
    return read_experiment(FOLDER / "head-to-head-gpu.yaml", Path()).plan


def test_gpu_systems_have_equal_caches_and_two_fit_80_gb(on_a_gpu):
    live, shares = on_a_gpu.live, []
    for system in on_a_gpu.systems:
        if system.tandem is None:
            given = vllm_arguments(live, first_variant(system).split)
        else:
            config = parse(tandem_config(on_a_gpu, live, system, {"interactive": {"ttft_ms": 100}}, {}))
            plan = memory_plan(config, FACTS.__getitem__, lambda: pytest.fail("it is stated"), support)
            assert plan.workspace_bytes > GIB
            # The plan has the KV cache that is given to vLLM, in whole blocks.
            given = config.models.chat.engine
            assert 0 <= given["kv_cache_memory_bytes"] - plan.kv_bytes < plan.geometry.bytes_per_block
            shares.append(plan.memory_bytes)
        assert given["kv_cache_memory_bytes"] == 4 * GIB
        assert "distributed_executor_backend" not in given and given["enforce_eager"] is False
    assert on_a_gpu.together * max(shares) < 79 * GIB


def test_baseline_gets_its_stated_cache(on_a_gpu):
    split = first_variant(on_a_gpu.systems[1]).split
    live = on_a_gpu.live
    assert vllm_arguments(live, split)["kv_cache_memory_bytes"] == 4 * GIB
    for more, bytes_ in (({"kv_cache": "6GiB"}, 6 * GIB), ({"flags": {"kv_cache_memory_bytes": None}}, None)):
        assert vllm_arguments(live, type(split)(**more))["kv_cache_memory_bytes"] == bytes_


def test_a_pinned_server_is_started_on_its_cores_with_its_niceness(on_a_gpu):
    split = Split(embedder=Pinned(cores=(1, 3), nice=19))
    command = embedding_server(on_a_gpu.live, split).command
    assert list(command[:5]) == ["taskset", "--cpu-list", "1,3", "nice", "--adjustment=19"]
    assert embedding_server(on_a_gpu.live, split).nice == 19
    assert embedding_server(on_a_gpu.live, Split()).command[0] == sys.executable


def test_each_server_of_a_split_has_its_queue_limit(on_a_gpu, tmp_path, monkeypatch):
    @contextmanager
    def nothing_started(servers):
        yield [server for server, _ in servers]

    monkeypatch.setattr(systems, "vllm_server", lambda *_, **__: Server("vllm", (), 1, "/"))
    monkeypatch.setattr(systems, "all_serving", nothing_started)
    limited = Split(max_concurrent=QueueLimits(llm=16, embedder=8))
    with running_system(on_a_gpu, SystemSection("pair", "baseline", split=limited), {}, tmp_path) as running:
        assert (running.chat.max_concurrent, running.embeddings.max_concurrent) == (16, 8)
