"""The server listens before its models are loaded, says how far they are, and ends if one does not load."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

import httpx
import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.common.servers import free_port
from controlplane.api.graceful_server import PLAIN, Hosting, _host
from controlplane.api.openapi import model_schemas
from controlplane.api.protocol.requests import HEADER_ROUTER_KEY
from controlplane.config import parse
from controlplane.core.errors import BackendDown
from controlplane.core.start_stages import StartStage, enter_stage
from controlplane.fleet.load_report import HEADER_LOAD
from controlplane.service.bootstrap import build_service
from controlplane.service.service import Service
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, HELLO, listens, until

pytestmark = pytest.mark.long

CHAT = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Hosted:
    """A hosted service whose embedding model loads until `load` has a result, or fails with its exception.

    Its start, once cancelled, ends when `may_end` is set; `ends` has what it did.
    """

    hosting: "asyncio.Task[int]"
    http: httpx.AsyncClient
    service: Service
    load: "asyncio.Future[None]"
    may_end: asyncio.Event
    ends: list[str]


@asynccontextmanager
async def hosted(hosting_as: Hosting = PLAIN, **sections) -> AsyncIterator[Hosted]:
    """Yields once the server listens."""
    port = free_port()
    models = {"chat": {"model": CHAT_MODEL}, "embeddings": [{"model": EMBED_MODEL}]}
    config = parse({"models": models, **sections, "server": {"port": port} | sections.get("server", {})})
    generator = ScriptedGenerator(model=CHAT_MODEL, default=HELLO)
    embedder, load = ScriptedEmbedder(model=EMBED_MODEL), asyncio.get_running_loop().create_future()
    start, may_end, ends = embedder.start, asyncio.Event(), list[str]()
    may_end.set()

    async def slow() -> None:
        enter_stage(StartStage.MEASURING)
        try:
            await load
        except asyncio.CancelledError:
            ends.append("begun")
            await may_end.wait()
            ends.append("complete")
            raise
        await start()

    embedder.start = slow
    service = build_service(config, [generator], [embedder], workspace_bytes=4 * embedder.workspace_bytes)
    hosting = asyncio.create_task(_host(service, config, hosting_as))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        await until(lambda: EMBED_MODEL in service.progress.parts or hosting.done())
        yield Hosted(hosting, http, service, load, may_end, ends)
        if not hosting.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(hosting, 10)
    gc.unfreeze()


async def test_readiness_names_stages_and_seconds():
    async with hosted() as host:
        answer = await host.http.get("/ready")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        body = answer.json()
        assert (body["status"], body["error"]["code"]) == ("starting", "starting")
        assert body["parts"][CHAT_MODEL]["stage"] is None
        assert body["parts"][EMBED_MODEL]["stage"] == "measuring"
        assert 0 <= body["parts"][EMBED_MODEL]["seconds"] <= body["seconds"]
        assert (await host.http.get("/health")).json() == {"status": "alive"}
        assert "dashboard" in (await host.http.get("/")).json()["links"]
        host.load.set_result(None)
        await until(lambda: host.service.is_started)
        assert (await host.http.get("/ready")).json() == {"status": "ready"}
        assert (await host.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_requests_during_the_start_are_told_to_come_back():
    async with hosted(server={"router_key_sha256": sha256(b"router").hexdigest()}) as host:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/", "/nowhere"):
            answer = await host.http.post(path, json=CHAT)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "starting")
            assert f"measuring {EMBED_MODEL} for" in error["message"]
        anthropic = await host.http.post("/v1/messages", json=CHAT)
        assert anthropic.json()["error"]["type"] == "overloaded_error"
        routed = await host.http.post("/v1/completions", json=CHAT, headers={HEADER_ROUTER_KEY: "router"})
        assert routed.status_code == 503 and HEADER_LOAD not in routed.headers


async def test_a_scraper_sees_a_starting_server_and_its_counters_at_zero():
    """Without an answer it takes the server for dead, and the alert of that pages after two minutes."""
    async with hosted() as host:
        answer = await host.http.get("/metrics")
        assert answer.status_code == 200
        assert "tandem_requests_total{" in answer.text and "\ntandem_config_version " not in answer.text
        host.load.set_result(None)
        await until(lambda: host.service.is_started)
        assert "\ntandem_config_version 1.0\n" in (await host.http.get("/metrics")).text


async def test_the_schemas_are_described_before_a_client_asks():
    """Else the first GET of /openapi.json stops the event loop for 0.15 s."""
    model_schemas.cache_clear()
    async with hosted() as host:
        host.load.set_result(None)
        await until(lambda: host.service.is_started and model_schemas.cache_info().currsize == 1)


async def test_the_health_port_answers_during_the_start():
    health_port = free_port()
    async with hosted(server={"health_port": health_port}) as host, asyncio.timeout(5):
        answer = await host.http.get(f"http://127.0.0.1:{health_port}/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")


@pytest.mark.parametrize("has_admin_key", [True, False])
async def test_the_last_line_says_what_is_served(caplog, has_admin_key):
    """It names the dashboard where the page can read its data, which needs the admin key."""
    caplog.set_level(logging.INFO)
    server = {"admin_key_sha256": sha256(b"root").hexdigest()} if has_admin_key else {}
    classes = {"gold": {"ttft_ms": 500, "default": True}, "bulk": {}}
    async with hosted(classes=classes, server=server) as host:
        host.load.set_result(None)
        await until(lambda: host.service.is_started and "ready after" in caplog.text)
        line = caplog.messages[-1]
        url = str(host.http.base_url)
    assert f"at {url}: models {CHAT_MODEL}, {EMBED_MODEL}; classes gold, bulk; active " in line
    assert line.endswith(f"; dashboard {url}/dashboard/") == has_admin_key
    assert ("dashboard" in line) == has_admin_key
    stages = [record.getMessage() for record in caplog.records if record.name == "tandem.start"]
    assert stages == [], "these models load at once, and such a stage has no line"


@pytest.mark.parametrize(
    ("error", "status"),
    [(BackendDown("model m does not load: no such file"), 1), (ValueError("engine arguments: no such"), 2)],
)
async def test_a_failed_start_ends_the_process_and_closes_the_port(error: Exception, status: int, caplog):
    async with hosted() as host:
        port = host.http.base_url.port
        host.load.set_exception(error)
        assert await asyncio.wait_for(host.hosting, 10) == status
        assert str(error) in caplog.text and "Traceback" not in caplog.text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_start_at_once(number: int, caplog):
    caplog.set_level(logging.INFO)
    async with hosted() as host:
        os.kill(os.getpid(), number)
        assert await asyncio.wait_for(host.hosting, 5) == 0
        assert not host.service.is_started
    assert "the start was ended by a signal" in caplog.text
    assert "Traceback" not in caplog.text


async def test_further_signals_do_not_interrupt_the_end_of_a_start():
    """Else a stopped worker, which is killed only after some seconds, would be left behind."""
    async with hosted() as host:
        host.may_end.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: host.ends == ["begun"])
        os.kill(os.getpid(), signal.SIGTERM)
        # The server stops listening before it waits for the start.
        async with asyncio.timeout(5):
            while await listens(host.http.base_url.port):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # The default action would end the test run.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        host.may_end.set()
        assert await asyncio.wait_for(host.hosting, 5) == 0
    assert host.ends == ["begun", "complete"]
