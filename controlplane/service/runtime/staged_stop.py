"""Stops parts in stages; a part that fails does not keep the others from stopping."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger(__name__)

Stop = Callable[[], Awaitable[None] | None]
Stage = Mapping[str, Stop]
"""Stops each part, by the part's name."""


async def stop_all(*stages: Stage) -> None:
    """Stops all parts of a stage at once, and each stage after the one before it.

    Errors are logged. A cancellation ends the wait for the current stage; the later stages still run, then
    CancelledError is raised.
    """
    cancelled: asyncio.CancelledError | None = None
    for stage in stages:
        try:
            results = await asyncio.gather(*map(_stop_part, stage.values()), return_exceptions=True)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        for name, result in zip(stage, results, strict=True):
            if result is not None:
                log.error("%s failed to stop: %r", name, result, exc_info=result)
    if cancelled is not None:
        raise cancelled


async def _stop_part(stop: Stop) -> None:
    if (pending := stop()) is not None:
        await pending
