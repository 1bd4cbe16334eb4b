"""Support of models and engine arguments by the hidden-state cache."""

import pytest

from backends.vllm.hybrid.support import memory_ratio, refusal, scratch_bytes

OPT = {"architectures": ["OPTForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip
LLAMA_3 = LLAMA_2 | {"num_key_value_heads": 8}


@pytest.mark.parametrize("config", [OPT, LLAMA_2])
def test_models_with_own_keys_per_head_need_half_the_memory(config):
    harmless = {"tensor_parallel_size": 1, "block_size": 16, "kv_cache_dtype": "auto", "model_impl": "vllm"}
    assert refusal(config, harmless) is None
    assert memory_ratio(config) == 0.5


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        # Llama-3.1-8B.
        (LLAMA_3, {}, "h=2: .* heads share them"),
        (LLAMA_3 | {"head_dim": 512}, {}, "num_key_value_heads=8: .* own keys"),
        (
            LLAMA_2 | {"architectures": ["Qwen2ForCausalLM"]},
            {},
            "architecture Qwen2ForCausalLM: supported are",
        ),
        (LLAMA_2 | {"sliding_window": 4096}, {}, "sliding_window=4096"),
        (LLAMA_2 | {"quantization_config": {"bits": 4}}, {}, "plain matrices"),
        (OPT, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: every rank"),
        (OPT, {"enable_prefix_caching": True}, "enable_prefix_caching=True: .* cannot be shared"),
        (OPT, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        (OPT, {"model_impl": "transformers"}, "model_impl=transformers: only vLLM's own"),
        (OPT, {"worker_cls": "my.Worker"}, "worker_cls=my.Worker: .* takes its place"),
        (OPT, {"kv_offloading_size": 4.0}, "kv_offloading_size=4.0"),
        (OPT, {"enable_lora": True}, "enable_lora=True"),
    ],
)
def test_the_refusal_names_the_reason(config, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(config, arguments))


def test_temporary_memory_of_decoding():
    """By hand for OPT-13B: 256 requests of 2,048 tokens, 10 bytes per head and token, 20 KiB per head."""
    assert scratch_bytes(OPT, requests=256, tokens=2_048) == 256 * 40 * (2_048 * 10 + 20 * 1_024)
