"""Blocks of models with layers of several kinds: all layers in each block, or the start is refused."""

from types import SimpleNamespace

import pytest

from backends import bundled_models
from controlplane.core.kv_geometry import kv_geometry

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

# Every sixth layer of Gemma-3-12b attends to all tokens, the others to a window.
GEMMA = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "hidden_size": 3840, "torch_dtype": "bfloat16",
}  # fmt: skip


def cache_groups(arguments):
    """The groups in which vLLM divides Gemma's layers, and the bytes of one block."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from backends.vllm.arguments import engine_args

    args = engine_args(str(bundled_models.ensure_tiny_model()), "name", arguments)
    is_off = args.disable_hybrid_kv_cache_manager
    layout = KVCacheLayout["LBNHC"]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=is_off),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    size = {"block_size": 16, "num_kv_heads": 8, "head_size": 256, "dtype": torch.bfloat16}
    layers = {
        f"layer.{at}": FullAttentionSpec(**size)
        if at % 6 == 5
        else SlidingWindowSpec(**size, sliding_window=1024)
        for at in range(48)
    }
    groups = kv_cache_utils.get_kv_cache_groups(config, layers)
    return len(groups), kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)


def test_a_block_of_a_model_with_sliding_windows_holds_all_its_layers():
    """The plan multiplies blocks by the bytes of all layers; a group of vLLM's holds a sixth of them."""
    assert cache_groups({}) == (1, kv_geometry(GEMMA).bytes_per_block)


def test_the_hybrid_manager_would_divide_the_layers():
    groups, block_bytes = cache_groups({"disable_hybrid_kv_cache_manager": False})
    assert groups == 6 and 6 * block_bytes == kv_geometry(GEMMA).bytes_per_block


def config_of(*, is_hybrid=False, is_attention_free=False, layer_types=None, is_off=True):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="some/model",
            is_hybrid=is_hybrid,
            is_attention_free=is_attention_free,
            hf_text_config=SimpleNamespace(layer_types=layer_types),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=is_off),
    )


MIXED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_hybrid": True}, "some/model: some layers keep a state of fixed size"),
        ({"is_attention_free": True}, "some/model: some layers keep a state of fixed size"),
        ({"layer_types": MIXED, "is_off": False}, "full_attention, sliding_attention.* remove it"),
    ],
)
def test_what_would_have_several_groups_is_refused_before_it_loads(given, message):
    from backends.vllm.arguments import require_one_cache_group

    with pytest.raises(ValueError, match=message):
        require_one_cache_group(config_of(**given))


@pytest.mark.parametrize(
    "given", [{}, {"layer_types": MIXED}, {"layer_types": ["full_attention"] * 2, "is_off": False}]
)
def test_other_models_are_served(given):
    from backends.vllm.arguments import require_one_cache_group

    require_one_cache_group(config_of(**given))
