"""What does vLLM's scheduler hold right now, in the policies' terms?

Of each running request: tokens that appeared since the last look, blocks held, and blocks that this step
will ask for. A request's blocks follow from its computed tokens; what the prefix cache
shares is counted with each of its readers, so `held` is what it can be relied on to give back only
where nothing is shared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from backends.vllm.balloon import Balloon
from controlplane.core.clock import Instant
from controlplane.core.view import Pace
from controlplane.policy.engine_step import EngineView
from controlplane.policy.progress import Progress


def stamp(request: Any, progress: Progress, now: Instant) -> None:
    if new := request.num_tokens - progress.tokens:
        progress.stamp(now, new)


def engine_view(
    running: Sequence[Any],
    progress: Mapping[str, Progress],
    balloon: Balloon,
    *,
    now: Instant,
    pace: Pace,
    block_tokens: int,
    quota: int,
    max_running: int,
    max_step_tokens: int,
    has_packed: bool = False,
) -> EngineView:
    names = [request.request_id for request in running]
    listed = [progress[name] for name in names]
    held: list[int] = []
    growth = 0
    # Written out, and apart from the look-ups above: most of the time here is waiting for memory.
    for request, one in zip(running, listed, strict=True):
        tokens, computed = request.num_tokens, request.num_computed_tokens
        if new := tokens - one.tokens:
            one.stamp(now, new)
        per_block = one.per_block or block_tokens
        blocks = -(-computed // per_block)
        known = tokens + len(request.spec_token_ids) + request.num_output_placeholders
        if known > blocks * per_block:
            growth += -(-min(known, computed + max_step_tokens) // per_block) - blocks
        held.append(blocks)
    return EngineView(
        now=now,
        pace=pace,
        block_tokens=block_tokens,
        quota=quota,
        used=balloon.used,
        growth=growth,
        free_slots=max_running - len(listed),
        running=listed,
        held=dict(zip(names, held, strict=True)),
        has_packed=has_packed,
    )
