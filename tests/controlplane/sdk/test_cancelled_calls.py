"""A call that its caller abandons ends on the server, which frees its lease."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from controlplane import sdk
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    listening,
    staged,
    until,
)


async def first_piece(tandem: sdk.AsyncTandem) -> None:
    async for _ in tandem.stream("hi", model=CHAT_MODEL):
        pass


CALLS: dict[str, Callable[[sdk.AsyncTandem], Awaitable[Any]]] = {
    "chat": lambda tandem: tandem.chat("hi", model=CHAT_MODEL),
    "stream": first_piece,
    "complete": lambda tandem: tandem.complete("hi", model=CHAT_MODEL),
    "embed": lambda tandem: tandem.embed(["a", "b"], model=EMBED_MODEL),
    "rerank": lambda tandem: tandem.rerank("a", ["b", "c"], model=RERANK_MODEL),
}


@pytest.mark.parametrize("name", CALLS)
async def test_cancelling_an_awaited_call_frees_its_lease(name: str):
    async with staged(is_stepped=True) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        engine = {"embed": stage.embedder, "rerank": stage.reranker}.get(name, stage.generator)
        task = asyncio.ensure_future(CALLS[name](tandem))
        await engine.until_runs(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(stage.is_clean)
        assert engine.runs[0].end == "aborted"


async def test_cancelling_a_stream_midway_frees_its_lease():
    async with staged(is_stepped=True) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        received = asyncio.Queue[str]()

        async def read() -> None:
            async for text in tandem.stream("hi", model=CHAT_MODEL):
                received.put_nowait(text)

        task = asyncio.create_task(read())
        await stage.generator.until_runs(1)
        stage.generator.allow(1)
        assert await received.get() == "Hello"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(stage.is_clean)
        assert stage.generator.runs[0].end == "aborted"


async def test_leaving_the_loop_over_a_stream_frees_its_lease():
    async with staged(is_stepped=True) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:

        async def read() -> str:
            async for text in tandem.stream("hi", model=CHAT_MODEL):
                return text
            return ""

        task = asyncio.create_task(read())
        await stage.generator.until_runs(1)
        stage.generator.allow(1)
        assert await task == "Hello"
        await until(stage.is_clean)
        assert stage.generator.runs[0].end == "aborted"


async def test_leaving_the_loop_over_a_blocking_stream_frees_its_lease():
    async with staged(is_stepped=True) as stage, listening(stage.app) as url:
        with sdk.Tandem(url) as tandem:
            stream = tandem.stream("hi", model=CHAT_MODEL)
            task = asyncio.create_task(asyncio.to_thread(lambda: next(iter(stream))))
            await stage.generator.until_runs(1)
            stage.generator.allow(1)
            assert await task == "Hello"
            await until(stage.is_clean)
        assert stage.generator.runs[0].end == "aborted"
