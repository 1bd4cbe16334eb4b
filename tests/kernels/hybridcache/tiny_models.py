"""Two-layer models in which attention matters: weights as large as in trained models, and non-zero biases."""

import math

import torch

_SIZES = {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_POSITIONS = 512


def _opt(*, norm_first):
    from transformers import OPTConfig

    return OPTConfig(
        **_SIZES, ffn_dim=192, max_position_embeddings=_POSITIONS, do_layer_norm_before=norm_first,
        word_embed_proj_dim=128 if norm_first else 64,
    )  # fmt: skip


def _llama(*, rotated):
    """Llama with the share `rotated` of each head rotated; below 1 it has biases, as Phi does."""
    from transformers import LlamaConfig

    turning = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": rotated}
    return LlamaConfig(
        **_SIZES, intermediate_size=192, max_position_embeddings=_POSITIONS, rope_parameters=turning,
        attention_bias=rotated < 1,
    )  # fmt: skip


CONFIGS = {
    "opt": lambda: _opt(norm_first=True),
    "opt, post-LN": lambda: _opt(norm_first=False),
    "llama": lambda: _llama(rotated=1.0),
    "phi-like": lambda: _llama(rotated=0.5),
}


def draw_weights(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.dim() > 1
            deviation = 1 / math.sqrt(parameter.shape[-1]) if is_matrix else 0.2
            parameter.normal_(0.0 if is_matrix else 0.5, deviation)


def save_model(name, folder):
    """Saves a checkpoint without a tokenizer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    draw_weights(model)
    model.save_pretrained(folder)
