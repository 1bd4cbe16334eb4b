"""A client that disconnects at any await of its request leaves no lease and no task."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Generator
from itertools import count
from types import coroutine
from typing import Any

import orjson
import pytest

from tests.controlplane.api.example_bodies import HI
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MAX_RUNNING,
    RERANK_MODEL,
    Stage,
    staged,
    until,
)

ASKED = {
    "chat": ("/v1/chat/completions", {"model": CHAT_MODEL, "messages": HI}),
    "stream": ("/v1/chat/completions", {"model": CHAT_MODEL, "messages": HI, "stream": True}),
    "prompts": ("/v1/completions", {"model": CHAT_MODEL, "prompt": ["a", "b", "c"], "n": 2, "stream": True}),
    "response": ("/v1/responses", {"model": CHAT_MODEL, "input": "hi", "stream": True}),
    "message": ("/v1/messages", {"model": CHAT_MODEL, "messages": HI, "max_tokens": 9}),
    "cohere": ("/v2/chat", {"model": CHAT_MODEL, "messages": HI, "stream": True}),
    "cohere embeddings": ("/v2/embed", {"model": EMBED_MODEL, "texts": ["word"] * 40}),
    "embeddings": ("/v1/embeddings", {"model": EMBED_MODEL, "input": ["word"] * 40}),
    "rerank": ("/v1/rerank", {"model": RERANK_MODEL, "query": "what", "documents": ["word"] * 40}),
}

STAYING = (0,) * MAX_RUNNING


class Client:
    """Disconnects at the `leaves_at`th await of its request, as that await begins or as it ends."""

    def __init__(self, leaves_at: int, body: dict[str, Any], *, is_cut: bool, as_it_ends: bool) -> None:
        self._leaves_at = leaves_at
        self._body = orjson.dumps(body)
        self._is_cut = is_cut
        self._as_it_ends = as_it_ends
        self._is_gone = asyncio.Event()
        self._has_asked = False
        self.waits = 0

    async def ask(self, stage: Stage, path: str) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        self._task = asyncio.create_task(self._waiting(stage.app(scope, self._receive, self._send)))
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    @coroutine
    def _waiting(self, asking: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        thrown: BaseException | None = None
        while True:
            try:
                what = asking.send(None) if thrown is None else asking.throw(thrown)
            except StopIteration:
                return
            self.waits += 1
            if self.waits == self._leaves_at:
                self._leave_at(what)
            try:
                yield what
            except BaseException as error:
                thrown = error
            else:
                thrown = None

    def _leave_at(self, what: asyncio.Future[Any] | None) -> None:
        if what is not None and self._as_it_ends:
            what.add_done_callback(lambda _: self._leave())
        else:
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        if self._is_cut:
            self._task.cancel()
        self._is_gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": self._body}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)


@pytest.mark.long
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("as_it_ends", [False, True])
@pytest.mark.parametrize("asked", ASKED)
async def test_disconnect_at_any_await_ends_the_request_once_and_frees_its_memory(asked, is_cut, as_it_ends):
    path, body = ASKED[asked]
    ends: Counter[str] = Counter()
    async with staged(admission={"engine_queue": 0}) as stage:
        accounting = stage.service.gate.dispatcher.accounting
        end = accounting.end

        def counted(ticket, now, outcome):
            end(ticket, now, outcome)
            ends[ticket.request.id] += 1

        accounting.end = counted
        for leaves_at in count(1):
            client, *others = (
                Client(at, body, is_cut=is_cut, as_it_ends=as_it_ends) for at in (leaves_at, *STAYING)
            )
            # The other requests come first, so that this one waits in the queue, too.
            await asyncio.gather(*(one.ask(stage, path) for one in (*others, client)))
            await until(stage.is_clean)
            if client.waits < leaves_at:
                break
        assert leaves_at > 3
        begun = {
            run.request.id for run in (*stage.generator.runs, *stage.embedder.runs, *stage.reranker.runs)
        }
    assert begun <= ends.keys()
    assert set(ends.values()) == {1}
