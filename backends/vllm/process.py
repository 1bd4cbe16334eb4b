"""How does the engine end with its server? vLLM's engine process does not look whether anybody is left; its
worker processes do.

Rule: what vLLM runs in that process is run by a function of ours, which first sees to it that the process
ends with its parent. From the very start: loading a model takes minutes.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm.v1.engine.core import EngineCoreProc

from backends.supervision import end_with_parent
from backends.vllm.compat import EngineDeadError

_run_engine_core = EngineCoreProc.run_engine_core


def run_engine_core(*given: Any, **named: Any) -> None:
    """A spawned process finds it by this name."""
    end_with_parent()
    _run_engine_core(*given, **named)


@contextmanager
def bound_to_parent() -> Iterator[None]:
    """Engines that are started in here end with this process."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run_engine_core)


# FOLDED alive.py:
# Does an answer still come? When an engine dies, vLLM ends every stream, but no utility call that waits.

Result = TypeVar("Result")


async def while_alive(llm: Any, call: Awaitable[Result]) -> Result:
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
