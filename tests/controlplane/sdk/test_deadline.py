"""A deadline bounds every call of its block: the objective it sends, its retries, its waits."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from controlplane import sdk
from controlplane.core.clock import milliseconds
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, listening, staged
from tests.controlplane.sdk.scripted_http import BOTH, GOOD, Answers, Server, call, chat_reply, error, vectors


@BOTH
async def test_each_call_sends_and_waits_what_remains(is_async: bool, clock: list[float]):  # noqa: FBT001
    server = Server(lambda *_: chat_reply("ok"))
    with sdk.deadline(ms=2500):
        await call(is_async, server, "chat", "hi", model="m")
        clock[0] += 1
        await call(is_async, server, "chat", "hi", model="m", e2e_ms=300, timeout=0.5)
        with sdk.deadline(ms=9000):
            await call(is_async, server, "chat", "hi", model="m", e2e_ms=20_000)
        with sdk.deadline(ms=200):
            await call(is_async, server, "ready")
    await call(is_async, server, "chat", "hi", model="m")
    assert [request.headers.get("x-slo-e2e-ms") for request in server.requests] == [
        "2500",
        "300",
        "1500",
        "200",
        None,
    ]
    limits = [request.extensions["timeout"] for request in server.requests]
    assert [limit["read"] for limit in limits] == pytest.approx([2.5, 0.5, 1.5, 0.2, 600])
    assert limits[0]["connect"] == limits[0]["pool"] == 2.5
    assert all(b"slo" not in request.content for request in server.requests)


@BOTH
async def test_a_passed_deadline_sends_nothing(is_async: bool, clock: list[float]):  # noqa: FBT001
    server = Server(lambda *_: chat_reply("ok"))
    with sdk.deadline(ms=2500):
        clock[0] += 2.5
        for name, args in (("chat", ["hi"]), ("embed", ["hi"]), ("tokenize", ["hi"])):
            with pytest.raises(sdk.DeadlineExceeded, match="the deadline of 2500 ms has passed"):
                await call(is_async, server, name, *args, model="m")
    assert server.requests == []


@BOTH
async def test_no_retry_that_would_end_after_the_deadline(is_async: bool, clock: list[float]):  # noqa: FBT001
    answers = Answers(error(429, "overloaded", retry_after="2"), GOOD)
    with sdk.deadline(ms=1500), pytest.raises(sdk.RateLimited):
        if is_async:
            async with sdk.AsyncTandem(transport=answers) as tandem:
                await tandem.chat("hi", model="m")
        else:
            with sdk.Tandem(transport=answers) as blocking:
                blocking.chat("hi", model="m")
    assert answers.calls == 1
    assert clock == [100.0]


@BOTH
async def test_a_refused_batch_is_not_repeated_after_the_deadline(is_async: bool, clock: list[float]):  # noqa: FBT001
    answers = Answers(
        error(429, "overloaded", retry_after="2"), partial(httpx.Response, 200, json=vectors([[1.0]]))
    )
    with sdk.deadline(ms=1500), pytest.raises(sdk.RateLimited):
        if is_async:
            async with sdk.AsyncTandem(transport=answers) as tandem:
                [batch async for batch in tandem.embed_many(["a"], model="e")]
        else:
            with sdk.Tandem(transport=answers) as blocking:
                list(blocking.embed_many(["a"], model="e"))
    assert answers.calls == 1
    assert clock == [100.0]


@BOTH
async def test_the_wait_for_a_response_ends_at_the_deadline(is_async: bool):  # noqa: FBT001
    async with staged(is_stepped=True) as stage, listening(stage.app) as url:
        with sdk.deadline(ms=300), pytest.raises(sdk.DeadlineExceeded):
            if is_async:
                async with sdk.AsyncTandem(url) as tandem:
                    await tandem.chat("hi", model=CHAT_MODEL)
            else:
                with sdk.Tandem(url) as blocking:
                    await asyncio.to_thread(blocking.chat, "hi", model=CHAT_MODEL)


async def test_the_server_gets_the_deadline_of_chat_and_embedding():
    async with staged() as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        with sdk.deadline(ms=60_000):
            await tandem.embed("hi", model=EMBED_MODEL)
            await tandem.chat("hi", model=CHAT_MODEL)
        embedded, chatted = stage.embedder.runs[0].request.slo.e2e, stage.generator.runs[0].request.slo.e2e
    assert embedded is not None
    assert chatted is not None
    assert milliseconds(0) < chatted < embedded <= milliseconds(60_000)


@BOTH
async def test_a_stream_keeps_the_deadline_of_its_block_and_has_the_received_text(
    is_async: bool,  # noqa: FBT001
    clock: list[float],
):
    half = b'data: {"choices":[{"delta":{"content":"half"},"finish_reason":null}]}\n\n'

    def pieces() -> Any:
        yield half
        clock[0] += 2
        yield half

    async def later() -> AsyncIterator[bytes]:
        for piece in pieces():
            yield piece

    answers = Answers(partial(httpx.Response, 200, content=later() if is_async else pieces()))
    if is_async:
        async with sdk.AsyncTandem(transport=answers) as tandem:
            with sdk.deadline(ms=1500):
                stream = tandem.stream("hi", model="m")
            with pytest.raises(sdk.DeadlineExceeded) as ended:
                [text async for text in stream]
    else:
        with sdk.Tandem(transport=answers) as blocking:
            with sdk.deadline(ms=1500):
                begun = blocking.stream("hi", model="m")
            with pytest.raises(sdk.DeadlineExceeded) as ended:
                list(begun)
    assert ended.value.text == "halfhalf"


@BOTH
async def test_a_read_that_the_deadline_cuts_short_is_no_lost_connection(is_async: bool, clock: list[float]):  # noqa: FBT001
    def too_slow(request: httpx.Request) -> httpx.Response:
        clock[0] += request.extensions["timeout"]["read"]
        raise httpx.ReadTimeout("too slow", request=request)

    with sdk.deadline(ms=1500), pytest.raises(sdk.DeadlineExceeded):
        await call(is_async, httpx.MockTransport(too_slow), "chat", "hi", model="m")
    with sdk.deadline(ms=1500), pytest.raises(sdk.ConnectionLost):
        await call(is_async, httpx.MockTransport(too_slow), "chat", "hi", model="m", timeout=0.1)


@pytest.mark.parametrize("ms", [0, -1, float("nan"), float("inf"), 86_400_001])
def test_a_deadline_is_at_most_a_day(ms: float):
    with pytest.raises(ValueError, match="should be milliseconds above 0"), sdk.deadline(ms=ms):
        pass


def test_the_clock_is_monotonic():
    with sdk.deadline(ms=1000) as found:
        assert 0 < found.remaining_s() <= 1
        assert found.at_s <= time.monotonic() + 1
