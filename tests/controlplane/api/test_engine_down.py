"""Responses while the LLM engine is dead: 503, with the time of its restart or without a retry."""

import asyncio

import pytest

from controlplane.api.errors import failure_of
from controlplane.core.errors import BackendDown
from tests.controlplane.api.example_bodies import CHAT, EMBED, chat
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, staged
from tests.controlplane.api.test_failures import ended


def test_an_engine_that_is_not_restarted_asks_for_no_retry():
    found = failure_of(BackendDown("it is dead", is_permanent=True), overload_status=429)
    assert (found.status, found.code, found.headers) == (503, "backend_down", {"x-should-retry": "false"})


@pytest.mark.parametrize("restart", [{}, "never"], ids=["restarts", "never"])
async def test_requests_while_the_engine_is_down(restart: object):
    """The engine's start never ends."""

    async def load() -> None:
        await asyncio.Event().wait()

    models = {"chat": {"model": CHAT_MODEL, "restart": restart}, "embeddings": [{"model": EMBED_MODEL}]}
    async with staged(is_stepped=True, models=models) as stage:
        asking = asyncio.create_task(stage.http.post(CHAT, json=chat()))
        await stage.generator.until_runs(1)
        stage.generator.on_start = load
        stage.generator.die()
        answers = [await asking, await stage.http.post(CHAT, json=chat())]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "backend_down")
            if restart == "never":
                assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
            else:
                assert int(answer.headers["retry-after"]) >= 1 and "x-should-retry" not in answer.headers
        assert (ended(stage, "generate", "failed"), ended(stage, "generate", "rejected")) == (1, 1)
        ready = await stage.http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "backend_down")
        asking = asyncio.create_task(stage.http.post(EMBED, json={"model": EMBED_MODEL, "input": "hi"}))
        await stage.embedder.until_runs(1)
        stage.embedder.allow()
        assert (await asking).status_code == 200
