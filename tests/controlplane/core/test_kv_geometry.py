"""Bytes of KV cache against published model configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.kv_geometry import GeometryError, KvGeometry, kv_geometry

MODELS = json.loads((Path(__file__).parents[2] / "golden/kv_bytes.json").read_text())["models"]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m["name"])
def test_bytes_per_token(model: dict[str, Any]) -> None:
    options = {key: model[key] for key in ("cache_dtype", "tensor_parallel") if key in model}
    geometry = kv_geometry(model["config"], **options)
    assert geometry.bytes_per_token == model["bytes_per_token"]
    assert geometry.bytes_per_block == 16 * model["bytes_per_token"]


@given(st.integers(0, 10_000), st.integers(1, 128))
def test_whole_blocks(tokens: int, block_tokens: int) -> None:
    geometry = KvGeometry(3, 2, block_tokens)
    blocks = geometry.blocks(tokens)
    assert blocks * block_tokens >= tokens > (blocks - 1) * block_tokens
    assert geometry.bytes(tokens) == blocks * block_tokens * 6


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_key_is_named(missing: str) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    del config[missing]
    with pytest.raises(GeometryError, match=missing):
        kv_geometry(config)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"'int3'.*bfloat16"):
        kv_geometry({"n_layer": 1, "n_head": 1, "n_embd": 8}, cache_dtype="int3")


def test_a_stage_of_a_pipeline_holds_its_layers() -> None:
    """The rank with most layers bounds the number of blocks."""
    config = {"num_hidden_layers": 10, "num_attention_heads": 2, "hidden_size": 8}
    whole, third = kv_geometry(config), kv_geometry(config, pipeline_parallel=3)
    assert (whole.bytes_per_token, third.bytes_per_token) == (10 * 32, 4 * 32)
