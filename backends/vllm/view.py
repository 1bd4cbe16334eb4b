"""What does vLLM's scheduler hold right now, in the policies' terms?

Of each running request: tokens that appeared since the last look, blocks held, and blocks that this step
will ask for. A request's blocks follow from its computed tokens; what the prefix cache
shares is counted with each of its readers, so `held` is what it can be relied on to give back only
where nothing is shared.
"""

from collections.abc import Sequence
from typing import Any

from backends.vllm.balloon import Balloon
from controlplane.core.clock import Instant
from controlplane.core.view import Pace
from controlplane.policy.engine_step import EngineView
from controlplane.policy.progress import Progress


def stamp(request: Any, now: Instant) -> None:
    progress: Progress = request.tandem
    if new := request.num_tokens - progress.tokens:
        progress.stamp(now, new)


def engine_view(
    running: Sequence[Any],
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
    # By column: most of the time here is waiting for memory, and a short loop waits for several at once.
    listed = [request.tandem for request in running]
    tokens = [request.num_tokens for request in running]
    computed = [request.num_computed_tokens for request in running]
    ahead = [len(request.spec_token_ids) + request.num_output_placeholders for request in running]
    growth = 0
    for one, present, done, more in zip(listed, tokens, computed, ahead, strict=True):
        if new := present - one.tokens:
            one.stamp(now, new)
        per_block = one.per_block or block_tokens
        one.held = held = -(-done // per_block)
        known = present + more
        if known > held * per_block:
            growth += -(-min(known, done + max_step_tokens) // per_block) - held
    return EngineView(
        now=now,
        pace=pace,
        block_tokens=block_tokens,
        quota=quota,
        used=balloon.used,
        growth=growth,
        free_slots=max_running - len(listed),
        running=listed,
        has_packed=has_packed,
    )
