"""Bytes per token of KV cache, from any Hugging Face config.

Bytes per token = 2 * layers * kv_heads * head_dim * bytes_per_element / tensor_parallel, in whole blocks;
with pipeline parallelism of the layers of one stage.
Multi-head latent attention caches one latent and one rotary key per layer instead of K and V.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


class GeometryError(ValueError):
    """The model config lacks a value that KV arithmetic needs."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Size of the KV cache of one rank; `elements_per_token` counts numbers over all layers and heads."""

    elements_per_token: int
    bytes_per_element: int
    block_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, all layers."""
        return self.elements_per_token * self.bytes_per_element

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.bytes_per_token * self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Whole blocks that hold `tokens`."""
        return -(-tokens // self.block_tokens)

    def bytes(self, tokens: int) -> int:
        """Bytes of the whole blocks that hold `tokens`."""
        return self.blocks(tokens) * self.bytes_per_block


def optional(config: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of these keys that is not None, or None."""
    return next((int(config[n]) for n in names if config.get(n) is not None), None)


def required(config: Mapping[str, Any], *names: str) -> int:
    """The value of the first of these keys that is not None. Raises GeometryError if there is none."""
    value = optional(config, *names)
    if value is None:
        raise GeometryError(
            f"model config has none of {', '.join(names)}: KV arithmetic needs it; "
            "check that the folder holds the model's config.json"
        )
    return value


def _kv_heads(config: Mapping[str, Any]) -> int | None:
    """Number of KV heads; None if each head has its own keys and values."""
    # Falcon-7B states multi_query and num_kv_heads=71; the flag is right, except in Falcon-40B's layout.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    nested = config.get("attn_config")  # MPT, DBRX
    return optional(config, *names) or (
        optional(nested, "kv_n_heads") if isinstance(nested, Mapping) else None
    )


def _elements_per_layer(config: Mapping[str, Any], tensor_parallel: int) -> int:
    if (latent := optional(config, "kv_lora_rank")) is not None:
        # The latent is not sharded by heads, so every rank holds all of it (DeepSeek-V2, section 2.1).
        return latent + required(config, "qk_rope_head_dim")
    heads = required(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config)
    if kv_heads is None:
        kv_heads = heads
    head_dim = optional(config, "head_dim", "kv_channels")
    if head_dim is None:
        head_dim = required(config, "hidden_size", "n_embd", "d_model") // heads
    # With more ranks than KV heads each rank keeps a copy of one head.
    return 2 * max(1, kv_heads // tensor_parallel) * head_dim


def kv_geometry(
    config: Mapping[str, Any],
    *,
    block_tokens: int = 16,
    cache_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> KvGeometry:
    """Geometry on the rank with most layers. Layers with a sliding window keep all tokens, as the others do.

    That holds for vLLM without its hybrid KV-cache manager.

    Raises GeometryError naming the missing key or the unknown dtype.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    layers = required(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    dtype = cache_dtype
    if dtype == "auto":
        named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
        dtype = str(named or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        # vLLM loads a model without a dtype, or with a 32-bit one, in 16 bits by default.
        dtype = "bfloat16" if dtype == "float32" else dtype
    if dtype not in DTYPE_BYTES:
        raise GeometryError(
            f"KV cache dtype {dtype!r}: known are {', '.join(sorted(DTYPE_BYTES))}; name one of them as "
            "engine.kv_cache_dtype"
        )
    stage = -(-layers // pipeline_parallel)
    return KvGeometry(stage * _elements_per_layer(text, tensor_parallel), DTYPE_BYTES[dtype], block_tokens)
