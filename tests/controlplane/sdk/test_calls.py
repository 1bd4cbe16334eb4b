"""What each call sends and returns, for both clients, against scripted responses and the real server."""

import asyncio
import inspect
from functools import partial

import httpx
import pytest
from opentelemetry import trace

from controlplane import sdk
from controlplane.sdk.replies import decision
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    RERANK_MODEL,
    TEXT,
    listening,
    staged,
)
from tests.controlplane.sdk.scripted_http import BOTH, Answers, Server, call, chat_reply, error

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def methods(client: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(client, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}


def test_both_clients_have_the_same_documented_methods():
    blocking, asynchronous = methods(sdk.Tandem), methods(sdk.AsyncTandem)
    asynchronous["close"] = asynchronous.pop("aclose")
    assert blocking.keys() == asynchronous.keys()
    for name, signature in blocking.items():
        assert signature.parameters == asynchronous[name].parameters, name
    documented = [method for client in (sdk.Tandem, sdk.AsyncTandem) for method in vars(client).items()]
    assert [
        name for name, method in documented if callable(method) and name[0] != "_" and not method.__doc__
    ] == []
    assert [name for name in sdk.__all__ if not inspect.getdoc(getattr(sdk, name))] == []


async def test_the_served_endpoints():
    async with staged() as stage, listening(stage.app) as url:
        async with sdk.AsyncTandem(url) as tandem:
            completed = await tandem.complete("hi", model=CHAT_MODEL, max_tokens=9)
            models = await tandem.models()
            assert await tandem.ready()
        with sdk.Tandem(url) as blocking:
            same = await asyncio.to_thread(blocking.complete, "hi", model=CHAT_MODEL, max_tokens=9)
    assert (completed.text, completed.finish_reason, completed.usage.completion_tokens) == (TEXT, "stop", 3)
    assert same.text == TEXT
    assert completed.decision.decision == "ADMIT"
    assert models == [
        sdk.ServedModel(CHAT_MODEL, "generate", 256),
        sdk.ServedModel(EMBED_MODEL, "embed", 64),
        sdk.ServedModel(RERANK_MODEL, "rerank", 64),
    ]


@BOTH
async def test_a_server_that_does_not_answer_is_not_ready(is_async: bool):  # noqa: FBT001
    down = await call(is_async, Answers(error(503, "backend_down")), "ready")
    assert (bool(down), down.reason) == (False, "503 backend_down: m")
    assert not await call(is_async, Answers(httpx.ConnectError("refused")), "ready")
    elsewhere = await call(is_async, Answers(partial(httpx.Response, 404, text="page not found")), "ready")
    assert not elsewhere and elsewhere.reason == "404 None: page not found"
    impaired = await call(is_async, Server(lambda *_: {"impaired": {"quotas": "defect"}}), "ready")
    assert impaired
    assert impaired.impaired == {"quotas": "defect"}


@BOTH
@pytest.mark.parametrize("content", [b"", b"OK", b'"OK"', b"<html></html>", b"[]", b"\xff"])
async def test_another_service_is_not_ready_and_its_answers_are_errors(is_async: bool, content: bytes):  # noqa: FBT001
    answer = partial(httpx.Response, 200, content=content)
    found = await call(is_async, Answers(answer), "ready")
    assert not found
    assert found.reason is not None and "does base_url name the server?" in found.reason
    with pytest.raises(sdk.InvalidResponse, match="/v1/models: no response of this API"):
        await call(is_async, Answers(answer), "models")
    for name, args in (("chat", ["q"]), ("complete", ["q"]), ("embed", ["q"]), ("rerank", ["q", ["a"]])):
        with pytest.raises(sdk.InvalidResponse):
            await call(is_async, Answers(answer), name, *args, model="m")


@BOTH
async def test_rerank_returns_the_given_documents_in_order_of_relevance(is_async: bool):  # noqa: FBT001
    results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.2}]
    server = Server(lambda *_: {"results": results, "usage": {"total_tokens": 7}})
    found = await call(is_async, server, "rerank", "q", ("a", "b"), model="r", top_n=2, service_class="gold")
    assert found.results == [sdk.ScoredDocument(1, 0.9, "b"), sdk.ScoredDocument(0, 0.2, "a")]
    assert (found.texts, found.usage.total_tokens) == (["b", "a"], 7)
    assert str(server.requests[0].url.path) == "/v1/rerank"
    assert server.bodies == [
        {
            "model": "r",
            "query": "q",
            "documents": ["a", "b"],
            "return_documents": False,
            "top_n": 2,
            "service_class": "gold",
        }
    ]


@BOTH
async def test_one_document_is_not_ranked_letter_by_letter(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: {"results": [{"index": 0, "relevance_score": 0.9}]})
    found = await call(is_async, server, "rerank", "q", "one document", model="r")
    assert (server.bodies[0]["documents"], found.texts) == (["one document"], ["one document"])


@BOTH
async def test_tokenize_takes_a_text_or_a_conversation(is_async: bool):  # noqa: FBT001
    reply = {"count": 2, "max_model_len": 256, "tokens": [5, 6], "token_strs": None}
    server = Server(lambda *_: reply)
    found = await call(is_async, server, "tokenize", "hi", model="m", add_special_tokens=False)
    assert found == sdk.TokenizedText(2, [5, 6], None, 256)
    await call(is_async, server, "tokenize", [{"role": "user", "content": "hi"}], model="m")
    assert server.bodies == [
        {"model": "m", "prompt": "hi", "add_special_tokens": False},
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    ]
    assert {request.url.path for request in server.requests} == {"/tokenize"}


@BOTH
async def test_timeout_is_the_wait_for_the_server(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: chat_reply("ok"))
    await call(is_async, server, "chat", "hi", model="m", timeout=2.5)
    await call(is_async, server, "chat", "hi", model="m")
    limits = [request.extensions["timeout"] for request in server.requests]
    assert limits[0] == {"connect": 2.5, "read": 2.5, "write": 2.5, "pool": 2.5}
    assert (limits[1]["connect"], limits[1]["read"]) == (10, 600)
    assert "timeout" not in server.bodies[0]


@BOTH
async def test_a_trace_is_continued(is_async: bool):  # noqa: FBT001
    server = Server(lambda *_: chat_reply("ok"))
    await call(is_async, server, "chat", "hi", model="m", traceparent=TRACE)
    context = trace.SpanContext(0xA, 0xB, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        await call(is_async, server, "chat", "hi", model="m")
    await call(is_async, server, "chat", "hi", model="m")
    sent = [request.headers.get("traceparent") for request in server.requests]
    assert sent == [TRACE, f"00-{0xA:032x}-{0xB:016x}-01", None]
    with pytest.raises(ValueError, match=r"traceparent='nonsense': should be"):
        await call(is_async, server, "chat", "hi", model="m", traceparent="nonsense")
    assert len(server.requests) == 3


@pytest.mark.parametrize(("stated", "read"), [("1.5", 1.5), ("3, 3", None), ("", None), (None, None)])
def test_a_header_that_a_proxy_has_changed_is_no_error(stated: str | None, read: float | None):
    headers = {} if stated is None else {"x-tandem-queue-ms": stated}
    assert decision(headers).queue_ms == read
