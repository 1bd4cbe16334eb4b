"""Blocks of the simulated KV cache."""

from controlplane.core.kv_geometry import KvGeometry

_EXTRA_QUEUED = 64
"""Requests waiting in the engine that an unlimited pool also has room for."""


def pool_blocks(geometry: KvGeometry, kv_bytes: int | None, max_model_tokens: int, max_running: int) -> int:
    """Blocks of the KV cache. Raises ValueError if the longest sequence would not fit."""
    if kv_bytes is None:
        kv_bytes = geometry.bytes(max_model_tokens) * 2 * (max_running + _EXTRA_QUEUED)
    blocks = kv_bytes // geometry.bytes_per_block
    if blocks < geometry.blocks(max_model_tokens):
        raise ValueError(
            f"kv_bytes={kv_bytes}: {blocks} blocks, but a sequence of "
            f"max_model_tokens={max_model_tokens} takes {geometry.blocks(max_model_tokens)} and would "
            "never finish; change either"
        )
    return blocks
