"""Does an answer still come? When an engine dies, vLLM ends every stream, but no utility call that waits."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from backends.vllm.compat import EngineDeadError

Answer = TypeVar("Answer")


async def while_alive(llm: Any, call: Awaitable[Answer]) -> Answer:
    """What the call to vLLM's AsyncLLM returns. Raises EngineDeadError as soon as the engine is gone."""
    answer = asyncio.ensure_future(call)
    # This task reads all that the engine says, so it ends with the engine. The first request starts it.
    reader: asyncio.Task[None] | None = llm.output_handler
    try:
        await asyncio.wait({answer, reader} if reader else {answer}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise EngineDeadError
        return answer.result()
    finally:
        answer.cancel()
