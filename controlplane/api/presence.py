"""Is the caller still there? While it is, work goes on; when it leaves, the work is cancelled.

A caller that takes nothing for `stalled_after_s` counts as gone: what it holds is others' memory.
"""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive, Send


class CallerGone(Exception):
    """Nobody is left to answer."""


class Presence:
    """Cancels the body of its `async with` and turns that into CallerGone when the caller leaves.

    The request's body must have been read: from then on `receive` tells only of the disconnect.
    """

    def __init__(self, receive: Receive, send: Send, *, stalled_after_s: float) -> None:
        self._receive = receive
        self._send = send
        self._stalled_after_s = stalled_after_s
        self._sending_since: float | None = None
        self._is_gone = False

    async def send(self, message: Message) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await self._send(message)
        self._sending_since = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Presence is entered inside a task")
        self._task = task
        self._earlier_cancels = task.cancelling()
        self._watch = asyncio.create_task(self._watch_caller())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        # The frame in which it ends refers to this, which else would live until a collection of garbage.
        del self._watch
        if not self._is_gone:
            return
        is_only_ours = self._task.uncancel() <= self._earlier_cancels
        if is_only_ours and kind is asyncio.CancelledError:
            raise CallerGone from error

    async def _watch_caller(self) -> None:
        while not self._is_stalled():
            try:
                async with asyncio.timeout(self._stalled_after_s):
                    message = await self._receive()
            except TimeoutError:
                continue
            if message["type"] == "http.disconnect":
                break
        self._is_gone = True
        self._task.cancel()

    def _is_stalled(self) -> bool:
        since = self._sending_since
        return since is not None and asyncio.get_running_loop().time() - since >= self._stalled_after_s
