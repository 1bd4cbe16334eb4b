"""vLLM's attention layer extended with hidden-state requests; it also receives the layer's input.

Requests on keys and values go through vLLM's own backend. For a request on hidden states the new rows are
written first. A single new token is then decoded with absorbed projections if the keys are not rotated,
otherwise with restored keys (`hybridcache.decode`). For several new tokens the earlier keys and values are
restored.
"""

from functools import cache, cached_property
from typing import Any

import torch
from hybridcache import decode, ops
from hybridcache.layout import BlockLayout, HeldTokens, Projection, Rotary
from torch.nn.functional import scaled_dot_product_attention
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.utils.torch_utils import direct_register_custom_op

from backends.vllm.hybrid.batch import Chunk, HiddenBatch, hybrid_backend
from backends.vllm.hybrid.cache import HybridSpec

# Runs Python code that reads the step's forms, so it must not be part of a captured graph.
OPERATION = "tandem_hybrid_attention"


class HybridAttention(Attention):  # type: ignore[misc]
    """Replaces `plain`, an attention layer of vLLM, which has no weights of its own.

    Args:
        plain: the layer to replace.
        qkv: the layer's QKV projection, which restores keys and values from hidden states.
        rotary: the rotary embedding; None if keys are not rotated.
    """

    def __init__(self, plain: Any, qkv: Any, rotary: Any | None) -> None:
        config = get_current_vllm_config()
        # Layers register by name, and this layer takes over the name.
        del config.compilation_config.static_forward_context[plain.layer_name]
        super().__init__(
            plain.num_heads,
            plain.head_size,
            plain.impl.scale,
            num_kv_heads=plain.num_kv_heads,
            cache_config=config.cache_config,
            quant_config=plain.quant_config,
            prefix=plain.layer_name,
            attn_backend=hybrid_backend(plain.attn_backend),
        )
        # On CPUs vLLM otherwise packs linear weights and drops the originals.
        qkv._cpu_skip_gemm_dispatch = True
        # In a tuple, so that the modules do not register as children a second time.
        self._sources = (qkv, rotary)
        self.hidden_size = qkv.input_size

    def forward(self, query: Any, key: Any, value: Any, hidden: Any) -> torch.Tensor:
        """Attention output `[tokens, heads * head_size]`; `hidden` is the input of the QKV projection."""
        output = torch.empty_like(query)
        per_head = [part.view(-1, self.num_heads, self.head_size) for part in (query, key, value, output)]
        getattr(torch.ops.vllm, OPERATION)(*per_head[:3], hidden, per_head[3], self.layer_name)
        return output

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The cache spec of vLLM's layer, with the hidden size added."""
        plain = super().get_kv_cache_spec(vllm_config)
        fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        return HybridSpec(**fields, hidden_size=self.hidden_size)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden: torch.Tensor,
        output: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: Any,
        slots: torch.Tensor | None,
    ) -> None:
        """Runs conversions, then attention of every request by its form, and writes `output` in place.

        Tensors are `[tokens, heads, head_size]`, except `hidden`, which is `[tokens, hidden_size]`.
        """
        batch: HiddenBatch | None = metadata.hybrid
        if batch is None:
            self._attend_plain(query, key, value, output, kv_cache, metadata, slots)
            return
        rows = self._layout(kv_cache).hidden_rows(kv_cache)
        for conversion in batch.conversions:
            past_keys, past_values = self._restore(rows, conversion.held)
            self._write(past_keys, past_values, kv_cache, conversion.slots)
        if len(batch.plain):
            index = batch.plain
            part = torch.empty_like(output[index])
            self._attend_plain(
                query[index], key[index], value[index], part, kv_cache, metadata, batch.plain_slots
            )
            output[index] = part
        ops.scatter_rows(hidden[batch.hidden], batch.hidden_slots, rows)
        if len(batch.decoding):
            output[batch.decoding] = self._decode(query[batch.decoding], rows, batch)
        for chunk in batch.chunks:
            index = slice(chunk.first, chunk.end)
            output[index] = self._attend_chunk(query[index], key[index], value[index], rows, chunk)

    def _attend_plain(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        slots: torch.Tensor | None,
    ) -> None:
        if slots is not None and not self.attn_backend.forward_includes_kv_cache_update:
            self._write(key, value, kv_cache, slots)
        self.impl.forward(self, query, key, value, kv_cache, metadata, output)

    def _write(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.impl.do_kv_cache_update(self, key, value, kv_cache, slots)

    def _decode(self, query: torch.Tensor, rows: torch.Tensor, batch: HiddenBatch) -> torch.Tensor:
        held, scale = batch.decoding_held, self.impl.scale
        if self.rotary is None:
            return decode.absorbed(query, rows, held, self.projection, scale)
        return decode.value_absorbed(query, rows, held, self.projection, self.rotary, scale)

    def _attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, chunk: Chunk
    ) -> torch.Tensor:
        mask = None
        if chunk.past:
            key, value = self._restore(rows, chunk.held)
            place = torch.arange(len(key), device=key.device)
            mask = place[None, :] <= place[chunk.past :, None]
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.impl.scale,
        )
        return attended[0].transpose(0, 1)

    def _restore(self, rows: torch.Tensor, held: HeldTokens) -> tuple[torch.Tensor, torch.Tensor]:
        return decode.restored_tokens(rows, held, self.projection, self.rotary, heads=self.num_heads)

    def _layout(self, kv_cache: torch.Tensor) -> BlockLayout:
        per_token = 2 * self.num_kv_heads * self.head_size
        block_tokens = kv_cache[0].numel() // per_token
        return BlockLayout(block_tokens, self.num_kv_heads, self.head_size, self.hidden_size)

    @cached_property
    def projection(self) -> Projection:
        """Key and value part of the QKV projection."""
        qkv, _ = self._sources
        width = self.num_heads * self.head_size
        _, *weights = qkv.weight.detach().split(width)
        biases = [None, None] if qkv.bias is None else qkv.bias.detach().split(width)[1:]
        return Projection(*weights, *biases)

    @cached_property
    def rotary(self) -> Rotary | None:
        """Cosines and sines of the rotary embedding; None if keys are not rotated."""
        _, embedding = self._sources
        return None if embedding is None else _angles(embedding)


# Cached, because all layers share one embedding.
@cache
def _angles(embedding: Any) -> Rotary:
    cos, sin = embedding.cos_sin_cache.float().chunk(2, -1)
    return Rotary(cos.contiguous(), sin.contiguous())


# Splits graphs that are captured without compilation, as vLLM's own attention does.
@eager_break_during_capture  # type: ignore[untyped-decorator]
def _hybrid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    metadata, layer, kv_cache, slots = get_attention_context(layer_name)
    if metadata is None:
        # vLLM's memory profiling run; the output is sampled from, so it must be finite.
        output.zero_()
        return
    layer.attend(query, key, value, hidden, output, kv_cache=kv_cache, metadata=metadata, slots=slots)


def _nothing(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Fake implementation, which compilers trace."""


direct_register_custom_op(OPERATION, _hybrid_attention, mutates_args=["output"], fake_impl=_nothing)
