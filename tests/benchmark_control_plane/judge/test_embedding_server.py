"""The plain endpoint answers as any does, and works for nobody who has left."""

import asyncio

import orjson
import pytest

from backends.scripted import ScriptedEmbedder
from benchmark_control_plane.judge.embedding_server import application
from benchmark_control_plane.virtual_time import run

SCOPE = {
    "type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "query_string": b"",
}  # fmt: skip


def asked(embedder, stays_seconds):
    """The status, and when it was sent; the caller leaves after `stays_seconds`."""
    body = orjson.dumps({"input": [[1, 2, 3]]})
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if coming:
            return coming.pop()
        await asyncio.sleep(stays_seconds)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append((asyncio.get_running_loop().time(), message))

    async def go():
        await embedder.start()
        await application(embedder)(SCOPE, receive, send)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(go())
    return sent[0][1]["status"], sent[0][0]


def test_a_caller_that_stays_is_answered():
    assert asked(ScriptedEmbedder(call_seconds=2), stays_seconds=60) == (200, pytest.approx(2))


def test_work_for_a_caller_that_left_is_dropped():
    assert asked(ScriptedEmbedder(call_seconds=60), stays_seconds=3) == (499, pytest.approx(3))
