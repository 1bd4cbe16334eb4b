"""Signals, drain, address errors and keep-alive of the server."""

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.api.graceful_server import _host, _options, _Server
from controlplane.config import parse
from controlplane.core.errors import BackendDown
from controlplane.service.bootstrap import build_service
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage, staged, until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("harmless_signals")]

CHAT = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hi"}]}
_BODY = json.dumps(CHAT).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


@asynccontextmanager
async def hosted(stage: Stage) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    options = uvicorn.Config(stage.app, port=0, lifespan="off", log_level="error", access_log=False)
    server = _Server(options, stage.service)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    host, port = server.servers[0].sockets[0].getsockname()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        yield http, serving
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


async def send_twice(stage: Stage, number: int) -> None:
    send(number)
    await until(lambda: stage.service.gate.is_closed)
    send(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_every_termination_signal_drains(number: int):
    async with staged(is_stepped=True) as stage, hosted(stage) as (http, serving):
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await stage.generator.until_runs(1)
        send(number)
        await until(lambda: stage.service.gate.is_closed)
        stage.generator.allow(3)
        assert (await asking).status_code == 200
        await asyncio.wait_for(serving, 10)


async def test_background_process_handles_sigint():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with staged() as stage, hosted(stage) as (_, serving):
            send(signal.SIGINT)
            await asyncio.wait_for(serving, 10)
            assert stage.service.gate.is_closed
    finally:
        signal.signal(signal.SIGINT, before)


async def test_second_signal_aborts_running_requests(caplog):
    """The drain time is 30 s; the second signal cuts it to 0."""
    caplog.set_level("INFO", "tandem")
    async with staged(is_stepped=True) as stage, hosted(stage) as (http, serving):
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await stage.generator.until_runs(1)
        await send_twice(stage, signal.SIGINT)
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        await asyncio.wait_for(serving, 5)
    logged = [record.getMessage() for record in caplog.records if record.name == "tandem"]
    assert [line.rpartition("; ")[2] for line in logged] == [
        "running ones may finish within 30 s", "running ones may finish within 0 s",
    ]  # fmt: skip


async def test_a_request_that_is_being_read_is_answered_after_a_second_signal(monkeypatch):
    """It has no ticket yet, so that its end is not part of the drain."""
    async with staged() as stage, hosted(stage) as (http, serving):
        render, reached, go_on = stage.generator.render_chat, asyncio.Event(), asyncio.Event()

        async def slow(prompt):
            reached.set()
            await go_on.wait()
            return await render(prompt)

        monkeypatch.setattr(stage.generator, "render_chat", slow)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await reached.wait()
        await send_twice(stage, signal.SIGTERM)
        # Longer than uvicorn's time between two looks at its connections.
        ended, _ = await asyncio.wait([serving], timeout=0.5)
        assert not ended
        go_on.set()
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        await asyncio.wait_for(serving, 5)


async def test_after_a_second_signal_nothing_is_waited_for_without_end(monkeypatch):
    async with staged() as stage, hosted(stage) as (http, serving):
        reached = asyncio.Event()

        async def never(prompt):
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(stage.generator, "render_chat", never)
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await reached.wait()
        await send_twice(stage, signal.SIGTERM)
        # The drain time is 30 s.
        await asyncio.wait_for(serving, 10)
        assert not asking.done()
        asking.cancel()


async def test_what_waits_to_be_accepted_when_the_server_ends_is_answered():
    """The loop does not run between the connections and the end, as when it is busy."""
    # On a busy machine they wait so long that they would be shed.
    async with staged(server={"port": 0, "limits": {"max_queue_delay_ms": 10_000}}) as stage:
        await stage.service.drain(0)
        options = _options(stage.service, stage.service.config)
        options.load()
        server = _Server(options, stage.service)
        server.lifespan = options.lifespan_class(options)
        await server.startup()
        address = server.servers[0].sockets[0].getsockname()
        clients = [socket.create_connection(address) for _ in range(40)]
        for client in clients:
            client.sendall(REQUEST)
        await asyncio.wait_for(server.shutdown(), 10)
        for client in clients:
            with client:
                assert client.recv(4096).startswith(b"HTTP/1.1 503")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


async def test_address_taken_during_start_stops_the_service():
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = {"port": other.getsockname()[1]}
        config = parse({"server": server, "models": {"embeddings": [{"model": "m"}]}})
        embedder = ScriptedEmbedder(model="m")
        service = build_service(config, [], [embedder], workspace_bytes=embedder.workspace_bytes)
        assert await _host(service, config) == 1
    gc.unfreeze()
    with pytest.raises(BackendDown, match="starting or stopping"):
        await service.check()


async def test_the_process_ends_with_1_if_the_engine_is_not_restarted():
    config = parse(
        {
            "server": {"port": 0},
            "models": {"chat": {"model": CHAT_MODEL, "restart": "never"}, "embeddings": [{"model": "m"}]},
        }
    )
    generator, embedder = ScriptedGenerator(model=CHAT_MODEL), ScriptedEmbedder(model="m")
    service = build_service(config, [generator], [embedder], workspace_bytes=embedder.workspace_bytes)
    hosting = asyncio.create_task(_host(service, config))
    await until(lambda: service._is_started)
    assert not hosting.done()
    generator.die()
    assert await asyncio.wait_for(hosting, 10) == 1
    gc.unfreeze()


async def test_refused_engine_configuration_exits_with_2():
    async def refuse() -> None:
        raise ValueError("engine arguments: no such")

    config = parse({"models": {"embeddings": [{"model": "m"}]}})
    embedder = ScriptedEmbedder(model="m")
    embedder.start = refuse
    service = build_service(config, [], [embedder], workspace_bytes=embedder.workspace_bytes)
    assert await _host(service, config) == 2


async def test_keep_alive_is_longer_than_that_of_load_balancers():
    """Load balancers keep idle connections for 60 s and must close them first."""
    async with staged() as stage:
        assert _options(stage.service, stage.service.config).timeout_keep_alive > 60
