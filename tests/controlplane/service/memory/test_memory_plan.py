"""The memory plan with a cache size among the engine's arguments."""

import pytest

from backends.vllm.hybrid import support
from controlplane.config import ConfigError, parse
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts, memory_plan

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
