"""vLLM's KV-cache manager extended to allocate a block per `rows_per_block` tokens on hidden states.

Requests on keys and values are allocated as usual. Importing this module imports vLLM and registers the cache
spec with it.
"""

from dataclasses import dataclass, replace
from typing import Any

from hybridcache.layout import BlockLayout
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class HybridSpec(FullAttentionSpec):  # type: ignore[misc]
    """vLLM's full-attention cache spec with the model's hidden size."""

    hidden_size: int = 0

    @property
    def layout(self) -> BlockLayout:
        """Layout of a block as rows of hidden states."""
        return BlockLayout(self.block_size, self.num_kv_heads, self.head_size, self.hidden_size)

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Merges the specs of layers that share a cache."""
        return replace(super().merge(specs), hidden_size=specs[0].hidden_size)


class HybridCache(FullAttentionManager):  # type: ignore[misc]
    """Allocates blocks by the form of each request.

    `hidden` holds the ids of the requests on hidden states. A request without blocks may be added or removed;
    a running request may only be removed, and its next step then allocates the missing blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden: set[str] = set()

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Blocks missing for `num_tokens` in the request's form."""
        plain_tokens = self._plain_tokens(request_id, num_tokens)
        missing: int = super().get_num_blocks_to_allocate(request_id, plain_tokens, *args, **kwargs)
        return missing

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Allocates the blocks missing for `num_tokens` in the request's form."""
        plain_tokens = self._plain_tokens(request_id, num_tokens)
        blocks: list[Any] = super().allocate_new_blocks(request_id, plain_tokens, *args, **kwargs)
        return blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Always 0: cascade attention would read hidden-state blocks as keys and values."""
        return 0

    def first_block(self, request_id: str) -> int:
        """Number of the request's first block, which identifies it in the worker."""
        block: int = self.req_to_blocks[request_id][0].block_id
        return block

    def _plain_tokens(self, request_id: str, tokens: int) -> int:
        """Tokens of keys and values that take the same number of blocks."""
        if request_id not in self.hidden:
            return tokens
        layout: BlockLayout = self.kv_cache_spec.layout
        return -(-tokens // layout.rows_per_block) * layout.block_tokens


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(HybridSpec, HybridCache, uniform_type_base_spec=FullAttentionSpec)
