"""How many blocks does a request take? As ever on keys and values; on hidden states, one for every
`rows_per_block` tokens.

Importing this module imports vLLM and makes the spec known to it.
"""

from dataclasses import dataclass, replace
from typing import Any

from hybridcache.layout import BlockLayout
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class HybridSpec(FullAttentionSpec):  # type: ignore[misc]
    hidden_size: int = 0

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_size, self.num_kv_heads, self.head_size, self.hidden_size)

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        return replace(super().merge(specs), hidden_size=specs[0].hidden_size)


class HybridCache(FullAttentionManager):  # type: ignore[misc]
    """`hidden` names the requests on hidden states. It may change for requests that hold no blocks, and,
    towards keys and values, for running ones: their next step takes the blocks that are missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden: set[str] = set()

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        room = self._plain_tokens(request_id, num_tokens)
        missing: int = super().get_num_blocks_to_allocate(request_id, room, *args, **kwargs)
        return missing

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        room = self._plain_tokens(request_id, num_tokens)
        blocks: list[Any] = super().allocate_new_blocks(request_id, room, *args, **kwargs)
        return blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None: a hidden block is never attended as keys and values."""
        return 0

    def first_block(self, request_id: str) -> int:
        block: int = self.req_to_blocks[request_id][0].block_id
        return block

    def _plain_tokens(self, request_id: str, tokens: int) -> int:
        """Tokens of keys and values that take as many blocks."""
        if request_id not in self.hidden:
            return tokens
        layout: BlockLayout = self.kv_cache_spec.layout
        return -(-tokens // layout.rows_per_block) * layout.block_tokens


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(HybridSpec, HybridCache, uniform_type_base_spec=FullAttentionSpec)
