"""How many of the embeddings' bytes may each model's batches take? What its longest input takes, where that
goes round, and of the rest its part of what all could use.
"""

from collections.abc import Collection

from controlplane.core.ports import Embedder
from controlplane.policy.sharing.lending import parts


def longest_input_bytes(embedder: Embedder) -> int:
    """As its passes have shown until now."""
    return embedder.batch_bytes([embedder.max_input_tokens])


def share_out(budget: int, embedders: Collection[Embedder]) -> None:
    least = [longest_input_bytes(embedder) for embedder in embedders]
    full = [embedder.workspace_bytes for embedder in embedders]
    for embedder, part in zip(embedders, parts(budget, least, full), strict=True):
        embedder.set_budget_bytes(part)
