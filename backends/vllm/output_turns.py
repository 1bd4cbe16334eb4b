"""Lets the event loop run between the messages that vLLM's client reads from its engine.

Two tasks of the client read what each step of the engine has sent: one decodes it, one converts its outputs.
Neither of them waits while there is more to read, so that the steps that an engine took while the event loop
was busy were handled without a pause, and the longer the more of them there were.
"""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient

_START_READING, _TAKE = "_ensure_output_queue_task", "get_output_async"


def take_turns() -> None:
    """Has vLLM's client decode, and convert, the outputs of at most one step in a turn of the event loop.

    Has no effect on a release that reads them elsewhere.
    """
    for name, changed in ((_START_READING, _reading_in_turns), (_TAKE, _taking_in_turns)):
        method = getattr(AsyncMPClient, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(AsyncMPClient, name, changed(method))


def _reading_in_turns(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method that starts the task which decodes, with a socket that is read once in a turn."""

    @wraps(start)
    def start_reading(client: Any) -> None:
        if client.resources.output_queue_task is None:
            socket = client.resources.output_socket
            socket.recv_multipart = _received_in_turn(socket.recv_multipart)
        start(client)

    return start_reading


def _received_in_turn(receive: Callable[..., Any]) -> Callable[..., Any]:
    """The method that receives a message, which returns in a later turn of the event loop in any case."""

    async def receive_in_turn(**options: Any) -> Any:
        message = receive(**options)
        if message.done():
            await asyncio.sleep(0)
        return await message

    return receive_in_turn


def _taking_in_turns(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The method that takes what was decoded, which returns in a later turn of the event loop in any case."""

    @wraps(take)
    async def take_in_turn(client: Any) -> Any:
        if client.outputs_queue is not None and not client.outputs_queue.empty():
            await asyncio.sleep(0)
        return await take(client)

    return take_in_turn
