"""Both SDK clients against the real server, and against servers that fail."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from controlplane import sdk
from controlplane.core.clock import milliseconds
from controlplane.sdk.errors import api_error
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    HELLO,
    TEXT,
    Stage,
    listening,
    staged,
)
from tests.controlplane.sdk.scripted_http import BOTH, GOOD, Answers, error

_NO_RETRY = sdk.Retries(most=0)
_AT_ONCE = sdk.Retries(most=2, first_wait_s=0)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged(classes={"standard": {"default": True}, "gold": {}}) as stage:
        yield stage


@pytest.fixture
async def url(stage: Stage) -> AsyncIterator[str]:
    async with listening(stage.app) as url:
        yield url


def use_all(url: str) -> dict[str, Any]:
    """Calls every method of the blocking client in one thread."""
    with sdk.Tandem(url) as tandem:
        reply = tandem.chat(
            "hi", model=CHAT_MODEL, max_tokens=9, temperature=0.5, service_class="gold", ttft_ms=150
        )
        with tandem.stream("hi", model=CHAT_MODEL) as stream:
            pieces = list(stream)
        return {
            "reply": reply,
            "pieces": pieces,
            "stream": stream,
            "vectors": tandem.embed(["a", "bc"], model=EMBED_MODEL),
        }


async def test_the_blocking_client(stage: Stage, url: str):
    got = await asyncio.to_thread(use_all, url)
    reply = got["reply"]
    assert (reply.text, reply.finish_reason, reply.usage.total_tokens) == (TEXT, "stop", 5)
    assert reply.decision.decision == "ADMIT"
    request, sampling = stage.generator.runs[0].request, stage.generator.runs[0].sampling
    assert (request.service_class.name, request.slo.ttft) == ("gold", milliseconds(150))
    assert sampling is not None
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.5)
    assert got["pieces"] == ["Hello", " wörld\u2028", "!"]
    assert got["stream"].usage.completion_tokens == 3
    assert got["stream"].finish_reason == "stop"
    assert got["stream"].decision.queue_ms >= 0
    assert got["vectors"].vectors.dtype == np.float32
    plain = await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": ["a", "bc"]})
    expected = [row["embedding"] for row in plain.json()["data"]]
    np.testing.assert_array_equal(got["vectors"].vectors, np.float32(expected))


async def test_the_asynchronous_client(stage: Stage, url: str):
    async with sdk.AsyncTandem(url) as tandem:
        reply = await tandem.chat([{"role": "user", "content": "hi"}], model=CHAT_MODEL, tpot_ms=20)
        assert (reply.text, reply.usage.prompt_tokens) == (TEXT, 2)
        assert stage.generator.runs[0].request.slo.tpot == milliseconds(20)
        stream = tandem.stream("hi", model=CHAT_MODEL)
        assert [piece async for piece in stream] == ["Hello", " wörld\u2028", "!"]
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 3
        short = await tandem.embed([[1, 2], [3]], model=EMBED_MODEL, dimensions=4, e2e_ms=5000)
        assert short.vectors.shape == (2, 4)
        assert short.usage.prompt_tokens == 3
        cut = await tandem.embed(
            "abcdef", model=EMBED_MODEL, truncate_prompt_tokens=2, truncation_side="left", extra={"user": "u"}
        )
        whole = await tandem.embed("ef", model=EMBED_MODEL)
        np.testing.assert_array_equal(cut.vectors, whole.vectors)


async def test_a_stream_closed_early_aborts_the_request():
    async with staged(is_stepped=True) as stage, listening(stage.app) as url, sdk.AsyncTandem(url) as tandem:
        stream = tandem.stream("hi", model=CHAT_MODEL)
        asking = asyncio.create_task(anext(aiter(stream)))
        await stage.generator.until_runs(1)
        stage.generator.allow(1)
        assert await asking == "Hello"
        await stream.aclose()
        await asyncio.wait_for(stage.generator.runs[0].ended.wait(), 5)
        assert stage.generator.runs[0].end == "aborted"


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda t: t.chat("hi", model="nobody"), sdk.NotFound),
        (lambda t: t.chat("x" * 300, model=CHAT_MODEL), sdk.ContextLengthExceeded),
        (lambda t: t.chat("hi", model=CHAT_MODEL, temperature=3), sdk.BadRequest),
        (lambda t: t.chat("hi", model=CHAT_MODEL, extra={"wish": 1}), sdk.BadRequest),
        (lambda t: anext(aiter(t.stream("hi", model=CHAT_MODEL, ttft_ms=-1))), sdk.BadRequest),
        (lambda t: t.embed([], model=EMBED_MODEL), sdk.BadRequest),
    ],
)
async def test_errors_are_typed(url: str, call: Callable[[sdk.AsyncTandem], Any], kind: type[sdk.ApiError]):
    async with sdk.AsyncTandem(url) as tandem:
        with pytest.raises(kind) as caught:
            await call(tandem)
    assert caught.value.status == (404 if kind is sdk.NotFound else 400)
    assert caught.value.request_id


async def test_stream_lost_midway_has_the_received_text(stage: Stage, url: str):
    stage.generator.default = replace(HELLO, request_fails_after=2)
    async with sdk.AsyncTandem(url) as tandem:
        stream = tandem.stream("hi", model=CHAT_MODEL)
        with pytest.raises(sdk.StreamLost) as lost:
            async for _ in stream:
                pass
    assert lost.value.text == "Hello wörld\u2028"
    assert isinstance(lost.value.__cause__, sdk.ServerError)


# --- servers that fail -----------------------------------------------------------------------


async def ask(is_async: bool, answers: Answers, retries: sdk.Retries = _AT_ONCE) -> str:  # noqa: FBT001
    if is_async:
        async with sdk.AsyncTandem(transport=answers, retries=retries) as tandem:
            return (await tandem.chat("hi", model="m")).text
    with sdk.Tandem(transport=answers, retries=retries) as blocking:
        return blocking.chat("hi", model="m").text


@BOTH
@pytest.mark.parametrize(
    "first",
    [
        error(429, "overloaded", retry_after_ms="1", retry_after="1"),
        error(409, "conflict"),
        error(500, "internal_error"),
        error(503, "backend_down"),
        partial(httpx.Response, 502, text="<html>"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("hung up"),
        error(400, "odd", x_should_retry="true"),
    ],
)
async def test_transient_failures_are_retried(is_async: bool, first: Any):  # noqa: FBT001
    answers = Answers(first, GOOD)
    assert await ask(is_async, answers) == "ok"
    assert answers.calls == 2


@BOTH
@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (error(400, "invalid_value"), sdk.BadRequest),
        (error(401, "invalid_api_key"), sdk.AuthenticationError),
        (error(403, "admin_disabled"), sdk.PermissionDenied),
        (error(429, "slo_unattainable", x_should_retry="false"), sdk.SloUnattainable),
        (error(429, "queue_timeout", retry_after="3600"), sdk.QueueTimeout),
        (httpx.ReadTimeout("too slow"), sdk.ConnectionLost),
    ],
)
async def test_permanent_failures_are_not_retried(is_async: bool, first: Any, kind: type[Exception]):  # noqa: FBT001
    answers = Answers(first, GOOD)
    with pytest.raises(kind):
        await ask(is_async, answers)
    assert answers.calls == 1


@BOTH
async def test_the_last_failure_is_raised(is_async: bool):  # noqa: FBT001
    answers = Answers(*[error(429, "rate_limit_exceeded", retry_after_ms="2")] * 3)
    with pytest.raises(sdk.RateLimited) as caught:
        await ask(is_async, answers)
    assert (answers.calls, caught.value.retry_after) == (3, 0.002)
    with pytest.raises(sdk.ConnectionLost):
        await ask(is_async, Answers(httpx.ConnectError("refused")), _NO_RETRY)


async def test_the_overload_status_may_be_503():
    with pytest.raises(sdk.RateLimited):
        await ask(True, Answers(error(503, "overloaded")), _NO_RETRY)


def refused(retry_after: str) -> sdk.ApiError:
    response = error(429, "overloaded", retry_after=retry_after)()
    return api_error(response.status_code, response.content, response.headers)


def test_retry_wait_is_bounded():
    retries = sdk.Retries(most=2, longest_wait_s=10)
    waits = [retries.wait_s(0, refused("4")) for _ in range(50)]
    assert all(wait is not None and 4.0 <= wait <= 5.0 for wait in waits)
    assert len(set(waits)) > 1
    assert retries.wait_s(0, refused("11")) is None
    assert retries.wait_s(2, sdk.ConnectionLost("refused")) is None


@pytest.mark.parametrize(
    ("stated", "least", "most"),
    [
        (lambda: format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True), 55, 60),
        (lambda: format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True), 0, 0),
        (lambda: "12", 12, 12),
    ],
)
def test_retry_after_may_be_a_date(stated: Callable[[], str], least: float, most: float):
    found = refused(stated()).retry_after
    assert found is not None and least <= found <= most


@pytest.mark.parametrize("stated", ["", "soon", "-1", "Sat, 28 Nov 2026 21:00:00 +99999999999999999999"])
def test_an_unreadable_retry_after_is_none(stated: str):
    assert refused(stated).retry_after is None


@pytest.mark.parametrize(
    "raised",
    [
        refused("4"),
        sdk.StreamLost("lost", "half"),
        sdk.DeadlineExceeded("passed", "half"),
        sdk.InvalidOutput("none", "half"),
        sdk.TooManyTurns("many", [{"role": "user"}]),
    ],
)
def test_errors_reach_the_parent_of_a_process_pool(raised: sdk.TandemError):
    found = pickle.loads(pickle.dumps(raised))
    assert type(found) is type(raised)
    assert (str(found), vars(found)) == (str(raised), vars(raised))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_stream_may_be_split_at_any_byte(size: int):
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": "é\u2028"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 3}},
    ]
    wire = b": ping\r\n\r\n" + b"".join(b"data: " + orjson.dumps(event) + b"\r\n\r\n" for event in events)
    wire += b"data: [DONE]\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(wire), size):
            yield wire[start : start + size]

    answers = Answers(lambda: httpx.Response(200, content=pieces()))
    async with sdk.AsyncTandem(transport=answers) as tandem:
        stream = tandem.stream("hi", model="m")
        assert [piece async for piece in stream] == ["é\u2028", "x"]
        assert stream.finish_reason == "length"
        assert stream.usage is not None


def streamed(*choices: dict[str, Any]) -> Answers:
    chunks = [b"data: " + orjson.dumps({"choices": [{"finish_reason": None} | c]}) + b"\n\n" for c in choices]
    return Answers(lambda: httpx.Response(200, content=b"".join(chunks) + b"data: [DONE]\n\n"))


def test_stream_assembles_tool_calls():
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city"'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "time"}},
        {"index": 0, "id": None, "function": {"name": None, "arguments": ':"Ulm"}'}},
    ]
    answers = streamed(
        {"index": 0, "delta": {"role": "assistant", "content": "Let me see."}},
        *({"index": 0, "delta": {"tool_calls": [piece]}} for piece in pieces),
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
    )
    with sdk.Tandem(transport=answers) as tandem, tandem.stream("hi", model="m") as stream:
        assert list(stream) == ["Let me see."]
        assert stream.finish_reason == "tool_calls"
        assert stream.tool_calls == [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}},
            {"id": "c2", "type": "function", "function": {"name": "time", "arguments": ""}},
        ]


async def test_reasoning_is_separate(stage: Stage, url: str):
    stage.generator.default = replace(HELLO, tokens=5, reasoning_words=("Let", " me"))
    async with sdk.AsyncTandem(url) as tandem:
        reply = await tandem.chat("hi", model=CHAT_MODEL)
        assert (reply.reasoning, reply.text) == ("Let me", TEXT)
        stream = tandem.stream("hi", model=CHAT_MODEL)
        assert "".join([piece async for piece in stream]) == TEXT
        assert stream.reasoning == "Let me"
        stage.generator.default = HELLO
        assert (await tandem.chat("hi", model=CHAT_MODEL)).reasoning == ""


def test_stream_yields_the_first_choice():
    answers = streamed(
        {"index": 1, "delta": {"content": "other"}},
        {"index": 0, "delta": {"content": "one"}, "finish_reason": "stop"},
        {"index": 1, "delta": {"content": "more"}, "finish_reason": "length"},
    )
    with sdk.Tandem(transport=answers) as tandem:
        with tandem.stream("hi", model="m", extra={"n": 2}) as stream:
            assert list(stream) == ["one"]
        assert (stream.finish_reason, stream.tool_calls) == ("stop", [])


@BOTH
async def test_stream_without_done_is_lost(is_async: bool):  # noqa: FBT001
    wire = b'data: {"choices":[{"delta":{"content":"half"},"finish_reason":null}]}\n\n'
    answers = Answers(lambda: httpx.Response(200, content=wire))
    with pytest.raises(sdk.StreamLost) as lost:
        if is_async:
            async with sdk.AsyncTandem(transport=answers) as tandem:
                async for _ in tandem.stream("hi", model="m"):
                    pass
        else:
            with sdk.Tandem(transport=answers) as blocking:
                list(blocking.stream("hi", model="m"))
    assert lost.value.text == "half"


@pytest.mark.parametrize("event", [b"<html>", b"[]", b'{"choices":[{}]}'])
def test_stream_with_an_event_of_another_format_is_lost(event: bytes):
    answers = Answers(lambda: httpx.Response(200, content=b"data: " + event + b"\n\n"))
    with sdk.Tandem(transport=answers) as tandem, pytest.raises(sdk.StreamLost, match="none of this API"):
        list(tandem.stream("hi", model="m"))


async def test_base_url_may_end_in_v1(stage: Stage, url: str):
    async with sdk.AsyncTandem(f"{url}/v1/") as tandem:
        assert (await tandem.chat("hi", model=CHAT_MODEL)).text == TEXT
