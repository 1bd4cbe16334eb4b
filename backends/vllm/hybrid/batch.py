"""Builds the attention metadata of a step: one part for KV-cache requests, one for hidden-state requests.

vLLM's attention backend for the platform gets metadata of the requests on keys and values only; `HiddenBatch`
describes the others.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hybridcache.layout import HeldTokens
from vllm.v1.attention.backend import AttentionCGSupport

from backends.vllm.compat import compact_layouts
from backends.vllm.hybrid import step_forms

# Fields of vLLM's CommonAttentionMetadata: device tensors, host tensors or arrays. 0.26 has no `req_idx`.
_PER_REQUEST = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx")
_PER_TOKEN = ("slot_mapping", "positions")
_COMPUTED_LATER = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request on hidden states with several new tokens, from batch index `first` up to `end`."""

    first: int
    end: int
    held: HeldTokens

    @property
    def past(self) -> int:
        """Tokens of the request before this step."""
        return self.held.longest - (self.end - self.first)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A request whose hidden states become keys and values at `slots`, numbered across all blocks."""

    held: HeldTokens
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """The step's tokens by form, as batch indices with their cache slots.

    Attributes:
        plain: tokens of requests on keys and values.
        plain_slots: their slots of keys and values.
        hidden: tokens of requests on hidden states.
        hidden_slots: their row slots.
        decoding: the part of `hidden` that belongs to requests with one new token.
        decoding_held: block tables of those requests.
        chunks: requests on hidden states with several new tokens.
        conversions: requests that leave hidden states in this step.
    """

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
    """Subclass of an attention backend whose metadata builder splits the batch by form.

    It supports only cache layouts in which the elements of a block are contiguous.
    """
    builder = type("SortingBuilder", (HybridMetadataBuilder, base.get_builder_cls()), {})
    overrides: dict[str, Any] = {"get_builder_cls": lambda: builder}
    if (layouts := compact_layouts(base)) is not None:
        overrides["supported_kv_cache_layouts"] = lambda: layouts
    return type(
        f"Hybrid{base.__name__}",
        (base,),
        {name: staticmethod(function) for name, function in overrides.items()},
    )


class HybridMetadataBuilder:
    """Mixin for vLLM's metadata builders that adds `hybrid`, a `HiddenBatch` or None, to the metadata."""

    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kw: Any) -> None:
        kernel_size, block_size = kv_cache_spec.block_size, vllm_config.cache_config.block_size
        if kernel_size != block_size:
            raise ValueError(
                f"engine.block_size={block_size}: this attention backend splits blocks to {kernel_size} "
                f"tokens, but the hidden-state cache needs whole blocks; set it to {kernel_size}"
            )
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kw)  # type: ignore[call-arg]

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        """Reports that attention cannot be captured; vLLM captures the pieces between attention layers."""
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Builds vLLM's metadata of the plain requests and attaches that of the others."""
        common, step = common_attn_metadata, step_forms.current()
        batch = None
        if step != step_forms.PLAIN:
            split = _SplitStep(common, step, self.kv_cache_spec.layout)
            batch = split.batch()
            if 0 < len(batch.plain) < split.tokens:
                common = split.plain_metadata()
        metadata = super().build(common_prefix_len, common, *args, **kwargs)  # type: ignore[misc]
        metadata.hybrid = batch
        return metadata


class _SplitStep:
    """Splits vLLM's CommonAttentionMetadata of one step by the forms of its requests."""

    def __init__(self, common: Any, step: step_forms.StepForms, layout: Any) -> None:
        self.common, self.layout = common, layout
        count = common.num_reqs
        self.device = common.seq_lens.device
        # On a GPU this synchronises with the device; it runs only in steps with hidden states.
        self.starts = common.query_start_loc_cpu[: count + 1].tolist()
        self.lengths = common.seq_lens[:count].tolist()
        first = common.block_table_tensor[:count, 0].tolist()
        # Padding rows of a captured graph have no tokens.
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
        """The description of the step for our attention."""
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
        """Metadata for vLLM's backend, restricted to the requests on keys and values."""
        common, rows = self.common, self._index(self.plain_rows)
        tokens = self._tokens(self.plain_rows)
        queries = [self._queries(row) for row in self.plain_rows]
        starts = torch.tensor([0, *queries], dtype=common.query_start_loc.dtype).cumsum(0, dtype=torch.int32)
        changes = {name: self._part(name, rows) for name in _PER_REQUEST if hasattr(common, name)}
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
        # Some fields are on the host.
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
        """Positions of this step's tokens within their request."""
        return range(self.lengths[row] - self._queries(row), self.lengths[row])

    def _slots(self, tokens: list[tuple[int, int]], per_block: int) -> torch.Tensor:
        """Slots of (row, position) pairs, in few operations: launching one costs more than running it."""
        row, place = self._index([row for row, _ in tokens]), self._index([place for _, place in tokens])
        block = self.common.block_table_tensor[row, place // per_block].long()
        return block * per_block + place % per_block

    def _conversion(self, row: int, tokens: int) -> Conversion:
        old = [(row, place) for place in range(tokens)]
        return Conversion(
            held=self._held([row], tokens=tokens),
            slots=self._slots(old, self.layout.block_tokens).to(self.common.slot_mapping.dtype),
        )
