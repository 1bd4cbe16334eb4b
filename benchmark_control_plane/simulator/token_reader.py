"""Reads the stream of a simulated generation by a function call per token.

A coroutine that resumes for each token costs more than all that the gate and the engine do for the token.
"""

from collections.abc import AsyncIterator, Callable

from backends.simulated.generator import SimulatedGenerator
from backends.simulated.sample_streams import TakeDelta
from controlplane.core.generation import Delta
from controlplane.service.gate.token_stream import TokenStream


async def read_to_end(
    generator: SimulatedGenerator,
    request_id: str,
    deltas: AsyncIterator[Delta],
    *,
    on_token: Callable[[int], object] | None = None,
) -> None:
    """Reads all deltas of a request, from the gate's stream or the generator's own.

    `on_token` is called with the choice of each token at its time, after the gate has counted it.
    """
    generator.takers[request_id] = _taker(deltas, on_token)
    try:
        async for delta in deltas:
            if on_token is not None and delta.token_ids:
                on_token(delta.index)
    finally:
        del generator.takers[request_id]


def _taker(deltas: AsyncIterator[Delta], on_token: Callable[[int], object] | None) -> TakeDelta:
    """What is called with each delta: first the gate's stream, then `on_token`, as far as there are any."""
    count = deltas.take if isinstance(deltas, TokenStream) else None
    if on_token is None:
        return count or (lambda delta: None)
    stamp = on_token

    def take(delta: Delta) -> None:
        if count is not None:
            count(delta)
        stamp(delta.index)

    return take
