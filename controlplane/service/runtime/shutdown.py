"""How does everything end, whatever one part of it does? In stages; within a stage all at once.

Rule: a part that fails to stop is told, and keeps neither its neighbours nor the next stage from stopping.
Who is cancelled meanwhile gives up the stage under way, goes through the others, and is cancelled then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger(__name__)

Stop = Callable[[], Awaitable[None] | None]
Stage = Mapping[str, Stop]
"""What stops each part, by the part's name."""


async def stop_all(*stages: Stage) -> None:
    cancelled: asyncio.CancelledError | None = None
    for stage in stages:
        try:
            ends = await asyncio.gather(*map(_stop_part, stage.values()), return_exceptions=True)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        for name, end in zip(stage, ends, strict=True):
            if end is not None:
                log.error("%s did not stop as it should: %r", name, end, exc_info=end)
    if cancelled is not None:
        raise cancelled


async def _stop_part(stop: Stop) -> None:
    if (ending := stop()) is not None:
        await ending
