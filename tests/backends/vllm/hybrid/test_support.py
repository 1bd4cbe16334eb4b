import pytest

from backends.vllm.hybrid.support import memory_ratio, refusal

OPT = {"architectures": ["OPTForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip
LLAMA_3 = LLAMA_2 | {"num_key_value_heads": 8}


@pytest.mark.parametrize("config", [OPT, LLAMA_2])
def test_heads_of_their_own_are_served_at_half_the_memory(config):
    assert refusal(config, {"tensor_parallel_size": 1, "block_size": 16}) is None
    assert memory_ratio(config) == 0.5


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        (LLAMA_3, {}, "h=2: .* heads share them"),
        (LLAMA_3 | {"head_dim": 512}, {}, "num_key_value_heads=8: .* own keys"),
        (LLAMA_2 | {"architectures": ["Qwen2ForCausalLM"]}, {}, "architecture Qwen2ForCausalLM: known are"),
        (LLAMA_2 | {"sliding_window": 4096}, {}, "sliding_window=4096"),
        (LLAMA_2 | {"quantization_config": {"bits": 4}}, {}, "plain matrices"),
        (OPT, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: every rank"),
        (OPT, {"enable_prefix_caching": True}, "enable_prefix_caching=True: .* cannot be shared"),
        (OPT, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        (OPT, {"enable_lora": True}, "enable_lora=True"),
    ],
)
def test_the_reason_is_named(config, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(config, arguments))
