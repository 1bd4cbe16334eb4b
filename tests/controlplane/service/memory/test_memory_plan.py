"""The memory plan with a stated cache size, on several GPUs, and with the defaults of a device."""

from collections.abc import Mapping

import pytest

from backends.vllm.hybrid import support
from controlplane.config import ConfigError, parse
from controlplane.service import preflight
from controlplane.service.memory.memory_plan import (
    WITHOUT_GPU,
    DeviceDefaults,
    MemoryPlan,
    ModelFacts,
    memory_plan,
    plan_text,
)

GIB = 2**30
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_attention_heads": 16,
    "num_hidden_layers": 4, "max_position_embeddings": 2048, "dtype": "float16",
}  # fmt: skip


def plan(engine: dict[str, int | str]) -> MemoryPlan:
    config = parse(
        {
            "models": {"chat": {"model": "some/model", "engine": engine}},
            "pool": {"memory": "4GiB", "reserve": 0, "activation": 0},
        },
        source="test",
    )
    return memory_plan(config, lambda name: ModelFacts(LLAMA, 2**28), lambda: 4 * GIB, support)


def test_a_stated_cache_is_planned_instead_of_the_share() -> None:
    stated, by_share = plan({"kv_cache_memory_bytes": GIB}), plan({})
    assert stated.kv_bytes == GIB < by_share.kv_bytes
    assert stated.kv_blocks == GIB // stated.geometry.bytes_per_block
    assert stated.workspace_bytes == by_share.workspace_bytes


def test_a_cache_larger_than_the_share_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes={4 * GIB}: quota.llm gives \d+ bytes"):
        plan({"kv_cache_memory_bytes": 4 * GIB})


def test_a_size_with_a_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes='4GiB': a whole number of bytes is needed"):
        plan({"kv_cache_memory_bytes": "4GiB"})


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
    "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip
WEIGHTS_70B = 141_107_412_992


def large_plan(
    engine: Mapping[str, object], pool: Mapping[str, object], defaults: DeviceDefaults = WITHOUT_GPU
) -> MemoryPlan:
    config = parse({"models": {"chat": {"model": "70b", "engine": engine}}, "pool": pool}, source="test")
    return memory_plan(
        config, lambda name: ModelFacts(LLAMA_70B, WEIGHTS_70B), lambda: 80 * GIB, support, defaults
    )


def test_a_model_on_several_gpus_is_planned_per_rank() -> None:
    with pytest.raises(ConfigError, match=r"larger engine\.tensor_parallel_size"):
        large_plan({}, {})
    four = large_plan({"tensor_parallel_size": 4}, {})
    assert four.chat_weight_bytes == WEIGHTS_70B // 4
    # 8,192 tokens: whole hidden states, a quarter of the MLP, logits of the whole vocabulary of 256 requests.
    assert four.activation_bytes == 2 * 8192 * (4 * 8192 + 2 * 28672 // 4) + 4 * 256 * 128256
    assert four.geometry is not None and four.geometry.bytes_per_token == 2 * 80 * 8 // 4 * 128 * 2
    assert "the chat model runs on 4 GPUs" in plan_text(four)
    assert "GPUs" not in plan_text(plan({}))


def test_a_stage_of_a_pipeline_holds_its_layers_and_the_embedding_table() -> None:
    four = large_plan({"pipeline_parallel_size": 4}, {})
    assert four.chat_weight_bytes == WEIGHTS_70B // 4 + 2 * 128256 * 8192
    assert four.activation_bytes == 2 * 8192 * (4 * 8192 + 2 * 28672) + 4 * 256 * 128256
    assert four.geometry is not None and four.geometry.bytes_per_token == 2 * 20 * 8 * 128 * 2
    both = large_plan({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {})
    assert both.geometry is not None
    assert both.geometry.bytes_per_token == four.geometry.bytes_per_token
    assert both.chat_layers == 40 and both.ranks == 4


def test_defaults_of_the_device_hold_where_nothing_is_stated() -> None:
    ranks, on_h100 = {"tensor_parallel_size": 4}, DeviceDefaults(1_024, 8_192, 3 * GIB)
    found = large_plan(ranks, {}, on_h100)
    assert found.reserve_bytes == 3 * GIB
    more = found.activation_bytes - large_plan(ranks, {}).activation_bytes
    assert more == 4 * (1_024 - 256) * 128256
    stated = large_plan({**ranks, "max_num_seqs": 256}, {"reserve": "1GiB"}, on_h100)
    assert stated.reserve_bytes == GIB
    assert stated.activation_bytes == large_plan(ranks, {}).activation_bytes
    doubled = large_plan({**ranks, "performance_mode": "throughput"}, {}, on_h100)
    assert doubled.activation_bytes == 2 * found.activation_bytes
    # The models keep most of a small part of a device.
    assert (
        large_plan(ranks, {"memory": "64GiB"}, DeviceDefaults(256, 8_192, 9 * GIB)).reserve_bytes == 8 * GIB
    )


def test_the_plan_has_the_defaults_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.probe, "gpu_name", lambda: "NVIDIA H100 80GB HBM3, driver 570.124.06")
    monkeypatch.setattr(preflight.probe, "memory_bytes", lambda: 79 * GIB)
    monkeypatch.setattr(preflight.probe, "free_gpu_bytes", lambda: 79 * GIB)
    config = parse({"models": {"chat": {"model": "tandem/tiny-llama"}}}, source="test")
    monkeypatch.setattr(preflight, "model_facts", lambda name: ModelFacts(LLAMA_70B, 2**30))
    found = preflight.plan_of(config)
    assert found.reserve_bytes == 3 * GIB
    assert found.activation_bytes == 2 * 8192 * (4 * 8192 + 2 * 28672) + 4 * 1_024 * 128256


def test_ranks_on_one_host_need_a_stated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.probe, "gpu_name", lambda: None)
    chat = {"model": "tandem/tiny-llama", "engine": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"pool\.memory=auto: without a GPU the ranks"):
        preflight.plan_of(parse({"models": {"chat": chat}}, source="test"))
    preflight.plan_of(parse({"models": {"chat": chat}, "pool": {"memory": "2GiB"}}, source="test"))
