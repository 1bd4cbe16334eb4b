"""Reads the stream of a simulated generation by a function call per token.

A coroutine that resumes for each token costs more than all that the gate and the engine do for the token.
"""

from collections.abc import AsyncIterator, Callable

from backends.simulated.generator import SimulatedGenerator
from controlplane.core.generation import Delta
from controlplane.service.gate.token_stream import TokenStream


async def read_to_end(
    generator: SimulatedGenerator,
    request_id: str,
    deltas: AsyncIterator[Delta],
    *,
    on_token: Callable[[int], object] = lambda index: None,
) -> None:
    """Reads all deltas of a request, from the gate's stream or the generator's own.

    `on_token` is called with the choice of each token at its time, after the gate has counted it.
    """
    count = deltas.take if isinstance(deltas, TokenStream) else None

    def take(delta: Delta) -> None:
        if count is not None:
            count(delta)
        on_token(delta.index)

    generator.takers[request_id] = take
    try:
        async for delta in deltas:
            if delta.token_ids:
                on_token(delta.index)
    finally:
        del generator.takers[request_id]
