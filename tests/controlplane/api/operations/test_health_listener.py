"""The listener of /health and /ready: independent of the event loop, and truthful about it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from controlplane.api.operations import health_listener
from controlplane.api.operations.health_listener import HealthListener
from controlplane.api.settings import ApiSettings
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged


@asynccontextmanager
async def listener(stage: Stage) -> AsyncIterator[str]:
    one = HealthListener(stage.service, ApiSettings, host="127.0.0.1", port=0)
    async with one.serving():
        yield f"http://127.0.0.1:{one.port}"


def get(url: str) -> tuple[int, dict[str, object]]:
    """Blocks the event loop; the listener answers from its thread."""
    reply = httpx.get(url, timeout=20)
    return reply.status_code, reply.json()


async def test_it_answers_while_the_event_loop_is_blocked():
    async with staged() as stage, listener(stage) as url:
        assert get(f"{url}/health") == (200, {"status": "alive"})
        assert get(f"{url}/ready") == (200, {"status": "ready"})
        assert get(f"{url}/metrics")[0] == 404


async def test_it_is_ready_as_soon_as_the_server_listens():
    async with staged() as stage, listener(stage) as url:
        assert get(f"{url}/ready")[0] == 200


async def test_a_death_is_published(monkeypatch):
    monkeypatch.setattr(health_listener, "_PERIOD_S", 0.001)
    chat = {"model": CHAT_MODEL, "restart": "never"}
    async with (
        staged(models={"chat": chat, "embeddings": [{"model": EMBED_MODEL}]}) as stage,
        listener(stage) as url,
    ):
        stage.generator.die()
        async with asyncio.timeout(5), httpx.AsyncClient() as http:
            while (reply := await http.get(f"{url}/ready")).status_code == 200:
                pass
        assert reply.json()["error"]["code"] == "backend_down"
        assert get(f"{url}/health")[0] == 200


async def test_an_event_loop_that_does_not_run_is_not_alive(monkeypatch):
    async with staged() as stage, listener(stage) as url:
        monkeypatch.setattr(health_listener, "_STALE_S", -1.0)
        for path in ("/health", "/ready"):
            status, body = get(url + path)
            assert (status, body["error"]["code"]) == (503, "event_loop_stalled")


async def test_its_thread_and_its_socket_end_with_it():
    async with staged() as stage:
        async with listener(stage) as url:
            assert "health" in {thread.name for thread in threading.enumerate()}
        assert "health" not in {thread.name for thread in threading.enumerate()}
        with pytest.raises(httpx.ConnectError):
            get(f"{url}/health")
