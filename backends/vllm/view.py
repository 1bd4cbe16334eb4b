"""What does vLLM's scheduler hold right now, in the policies' terms?

One pass over the running requests: tokens that appeared since the last look, blocks held, and blocks
that this step will ask for. A request's blocks follow from its computed tokens; what the prefix cache
shares is counted with each of its readers, so `held` is what it can be relied on to give back only
where nothing is shared.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from backends.vllm.balloon import Balloon
from controlplane.core.clock import Instant
from controlplane.core.view import Pace
from controlplane.policy.engine_step import EngineView
from controlplane.policy.progress import Progress


def stamp(request: Any, progress: Progress, now: Instant) -> None:
    new = request.num_output_tokens + progress.resumed - progress.done
    if new:
        progress.stamp(now, new)


def engine_view(
    running: Iterable[Any],
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
    listed: list[Progress] = []
    held: dict[str, int] = {}
    growth = 0
    for request in running:
        name, tokens, computed = request.request_id, request.num_tokens, request.num_computed_tokens
        one = progress[name]
        # Written out: half of the plug-in's time goes by in this loop.
        if new := tokens - request.num_prompt_tokens + one.resumed - one.done:
            one.stamp(now, new)
        per_block = one.per_block or block_tokens
        held[name] = blocks = -(-computed // per_block)
        known = tokens + len(request.spec_token_ids) + request.num_output_placeholders
        if known > blocks * per_block:
            growth += -(-min(known, computed + max_step_tokens) // per_block) - blocks
        listed.append(one)
    return EngineView(
        now=now,
        pace=pace,
        block_tokens=block_tokens,
        quota=quota,
        used=balloon.used,
        growth=growth,
        free_slots=max_running - len(listed),
        running=listed,
        held=held,
        has_packed=has_packed,
    )
