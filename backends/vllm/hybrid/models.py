"""vLLM's OPT and Llama models with attention layers that can store hidden states."""

from typing import Any

from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM

from backends.vllm.hybrid.attention import HybridAttention
from backends.vllm.hybrid.support import PREFIX


class _OptAttention(nn.Module):  # type: ignore[misc]
    """OPT attention with the same parameters under the same names, so that checkpoints load."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.qkv_proj, self.out_proj = plain.qkv_proj, plain.out_proj
        self.attn = HybridAttention(plain.attn, plain.qkv_proj, None)

    def forward(self, hidden_states: Any) -> Any:
        """Attention output `[tokens, hidden_size]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        attended = self.attn(*qkv.chunk(3, dim=-1), hidden_states)
        output, _ = self.out_proj(attended)
        return output


class _LlamaAttention(nn.Module):  # type: ignore[misc]
    """Llama attention with the same parameters under the same names, so that checkpoints load."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj, self.rotary_emb = plain.qkv_proj, plain.o_proj, plain.rotary_emb
        self.attn = HybridAttention(plain.attn, plain.qkv_proj, plain.rotary_emb)

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        """Attention output `[tokens, hidden_size]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.chunk(3, dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value, hidden_states))
        return output


class HybridOpt(OPTForCausalLM):  # type: ignore[misc]
    """OPT whose attention layers can store hidden states."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.decoder.layers:
            layer.self_attn = _OptAttention(layer.self_attn)


class HybridLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Llama whose attention layers can store hidden states."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn = _LlamaAttention(layer.self_attn)


_MODELS = {"OPTForCausalLM": HybridOpt, "LlamaForCausalLM": HybridLlama}


def register() -> None:
    """Registers the models with vLLM under prefixed architecture names, once."""
    for architecture, model in _MODELS.items():
        if PREFIX + architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(PREFIX + architecture, model)
