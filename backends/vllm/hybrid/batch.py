"""Who in this batch attends how? Sorts a step's requests before any layer runs, once for all layers.

The backend that vLLM chose for the platform describes the requests on keys and values as if there were no
others; the rest is described by `HiddenBatch`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hybridcache.layout import HeldTokens
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from backends.vllm.hybrid import step_forms

# Of a backend that states none; vLLM prefers the first as well.
_LAYOUTS = (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)

# In tensors, or, on the host, in an array.
_PER_REQUEST = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx")
_PER_TOKEN = ("slot_mapping", "positions")
_COMPUTED_LATER = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request that reads several tokens at once: those of the batch from `first` up to `end`."""

    first: int
    end: int
    held: HeldTokens

    @property
    def past(self) -> int:
        return self.held.longest - (self.end - self.first)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Hidden rows that become keys and values in `slots`, counted through the blocks."""

    held: HeldTokens
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """`plain` and `hidden` are the batch's tokens by form, as indices; `decoding` those of `hidden` that are
    alone of their request."""

    plain: torch.Tensor
    plain_slots: torch.Tensor
    hidden: torch.Tensor
    hidden_slots: torch.Tensor
    decoding: torch.Tensor
    decoding_held: HeldTokens
    chunks: tuple[Chunk, ...]
    conversions: tuple[Conversion, ...]


@cache
def hybrid_backend(base: Any) -> Any:
    """The platform's attention backend, with a builder that sorts, and only such caches as have a block's
    elements side by side."""
    builder = type("SortingBuilder", (HybridMetadataBuilder, base.get_builder_cls()), {})
    layouts = tuple(one for one in base.supported_kv_cache_layouts() or _LAYOUTS if one.is_block_compact)
    own = {"get_builder_cls": lambda: builder, "supported_kv_cache_layouts": lambda: layouts}
    return type(f"Hybrid{base.__name__}", (base,), {name: staticmethod(made) for name, made in own.items()})


class HybridMetadataBuilder:
    """Mixed in before a metadata builder of vLLM."""

    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kw: Any) -> None:
        cut, whole = kv_cache_spec.block_size, vllm_config.cache_config.block_size
        if cut != whole:
            raise ValueError(
                f"engine.block_size={whole}: attention here cuts blocks to {cut} tokens, but requests on "
                f"hidden states are named by whole blocks; set it to {cut}"
            )
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kw)  # type: ignore[call-arg]

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        """Never as part of a graph; vLLM captures what lies between the attention layers."""
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        common, step = common_attn_metadata, step_forms.current()
        batch = None
        if step != step_forms.PLAIN:
            found = _SplitStep(common, step, self.kv_cache_spec.layout)
            batch = found.batch()
            if 0 < len(batch.plain) < found.tokens:
                common = found.plain_metadata()
        metadata = super().build(common_prefix_len, common, *args, **kwargs)  # type: ignore[misc]
        metadata.hybrid = batch
        return metadata


class _SplitStep:
    def __init__(self, common: Any, step: step_forms.StepForms, layout: Any) -> None:
        self.common, self.layout = common, layout
        count = common.num_reqs
        self.device = common.seq_lens.device
        # On a GPU this waits for the numbers; only steps with hidden states come here.
        self.starts = common.query_start_loc_cpu[: count + 1].tolist()
        self.lengths = common.seq_lens[:count].tolist()
        first = common.block_table_tensor[:count, 0].tolist()
        # Rows that only fill a captured graph have no tokens.
        self.rows = [row for row in range(count) if self.lengths[row] and self._queries(row)]
        self.hidden_rows = [row for row in self.rows if first[row] in step.hidden]
        taken = set(self.hidden_rows)
        self.plain_rows = [row for row in self.rows if row not in taken]
        converted = step.converted
        self.converted = {row: converted[first[row]] for row in self.rows if first[row] in converted}
        self.tokens = self.starts[-1]

    def _queries(self, row: int) -> int:
        return int(self.starts[row + 1] - self.starts[row])

    def batch(self) -> HiddenBatch:
        single = [row for row in self.hidden_rows if self._queries(row) == 1]
        several = [row for row in self.hidden_rows if self._queries(row) > 1]
        plain = self._tokens(self.plain_rows)
        new = [(row, place) for row in self.hidden_rows for place in self._new_places(row)]
        return HiddenBatch(
            plain=plain,
            plain_slots=self.common.slot_mapping[plain],
            hidden=self._tokens(self.hidden_rows),
            hidden_slots=self._slots(new, self.layout.rows_per_block),
            decoding=self._tokens(single),
            decoding_held=self._held(single),
            chunks=tuple(Chunk(self.starts[row], self.starts[row + 1], self._held([row])) for row in several),
            conversions=tuple(self._conversion(row, tokens) for row, tokens in self.converted.items()),
        )

    def plain_metadata(self) -> Any:
        """vLLM's description of the step, of the requests on keys and values alone."""
        common, rows = self.common, self._index(self.plain_rows)
        tokens = self._tokens(self.plain_rows)
        queries = [self._queries(row) for row in self.plain_rows]
        starts = torch.tensor([0, *queries], dtype=common.query_start_loc.dtype).cumsum(0, dtype=torch.int32)
        changes = {name: self._part(name, rows) for name in _PER_REQUEST}
        changes |= {name: self._part(name, tokens) for name in _PER_TOKEN}
        changes |= dict.fromkeys(_COMPUTED_LATER)
        return common.replace(
            num_reqs=len(queries),
            num_actual_tokens=len(tokens),
            max_query_len=max(queries),
            max_seq_len=max(self.lengths[row] for row in self.plain_rows),
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            **changes,
        )

    def _part(self, name: str, chosen: torch.Tensor) -> Any:
        whole = getattr(self.common, name)
        if whole is None:
            return None
        # Some of them lie on the host.
        return whole[chosen.to(whole.device) if isinstance(whole, torch.Tensor) else chosen.cpu().numpy()]

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _tokens(self, rows: list[int]) -> torch.Tensor:
        return self._index([token for row in rows for token in range(self.starts[row], self.starts[row + 1])])

    def _held(self, rows: list[int], *, tokens: int | None = None) -> HeldTokens:
        lengths = [self.lengths[row] if tokens is None else tokens for row in rows]
        longest = max(lengths, default=0)
        blocks = -(-longest // self.layout.rows_per_block)
        return HeldTokens(
            tables=self.common.block_table_tensor[self._index(rows), :blocks].to(torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            longest=longest,
        )

    def _new_places(self, row: int) -> range:
        """Of the tokens of this step, within their request."""
        return range(self.lengths[row] - self._queries(row), self.lengths[row])

    def _slots(self, tokens: list[tuple[int, int]], per_block: int) -> torch.Tensor:
        """Of (row, place) each. In one go, because each operation costs a GPU's host more than the GPU."""
        row, place = self._index([row for row, _ in tokens]), self._index([place for _, place in tokens])
        block = self.common.block_table_tensor[row, place // per_block].long()
        return block * per_block + place % per_block

    def _conversion(self, row: int, tokens: int) -> Conversion:
        old = [(row, place) for place in range(tokens)]
        return Conversion(
            held=self._held([row], tokens=tokens),
            slots=self._slots(old, self.layout.block_tokens).to(self.common.slot_mapping.dtype),
        )
