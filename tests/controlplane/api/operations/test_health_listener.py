"""The listener of /health and /ready: independent of the event loop, and truthful about it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from controlplane.api.listening_sockets import listening
from controlplane.api.operations import health_listener, health_responder
from controlplane.api.operations.health_listener import HealthListener
from controlplane.api.operations.health_responder import Responder
from controlplane.api.settings import ApiSettings
from tests.controlplane.api.scripted_server import CHAT_MODEL, EMBED_MODEL, Stage, staged


@asynccontextmanager
async def listener(stage: Stage) -> AsyncIterator[HealthListener]:
    one = HealthListener(stage.service, ApiSettings, listening("127.0.0.1", 0))
    async with one.serving():
        yield one


def address_of(one: HealthListener) -> tuple[str, int]:
    return one._sockets[0].getsockname()


def url_of(one: HealthListener) -> str:
    return "http://{}:{}".format(*address_of(one))


def get(one: HealthListener, path: str, method: str = "GET") -> httpx.Response:
    return get_url(url_of(one) + path, method)


def get_url(url: str, method: str = "GET") -> httpx.Response:
    """Blocks the event loop; the listener answers from its process."""
    return httpx.request(method, url, timeout=20)


def content(answer: httpx.Response) -> tuple[int, dict[str, object]]:
    return answer.status_code, answer.json()


def exchange(one: HealthListener, request: bytes) -> bytes:
    with socket.create_connection(address_of(one), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                answer += part
        return answer


async def test_it_answers_while_the_event_loop_is_blocked(monkeypatch):
    # On a busy machine the calls take longer than a loop may be silent.
    monkeypatch.setattr(health_listener, "_READY_STALE_S", 60.0)
    async with staged() as stage, listener(stage) as one:
        assert content(get(one, "/health")) == (200, {"status": "alive"})
        assert content(get(one, "/ready?verbose=1")) == (200, {"status": "ready"})
        for method, path in (("GET", "/metrics"), ("POST", "/health"), ("GET", "/v1/models")):
            assert get(one, path, method).json()["error"]["code"] == "not_found"
        head = get(one, "/ready", "HEAD")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "18")


async def test_it_serves_each_address_of_its_host():
    async with staged() as stage:
        sockets = [*listening("127.0.0.1", 0), *listening("127.0.0.2", 0)]
        urls = ["http://{}:{}/health".format(*one.getsockname()) for one in sockets]
        async with HealthListener(stage.service, ApiSettings, sockets).serving():
            assert [get_url(url).status_code for url in urls] == [200, 200]


async def test_a_death_is_published(monkeypatch):
    monkeypatch.setattr(health_listener, "_CHECK_S", 0.001)
    monkeypatch.setattr(health_listener, "_BEAT_S", 0.001)
    chat = {"model": CHAT_MODEL, "restart": "never"}
    async with (
        staged(models={"chat": chat, "embeddings": [{"model": EMBED_MODEL}]}) as stage,
        listener(stage) as one,
    ):
        stage.generator.die()
        async with asyncio.timeout(5), httpx.AsyncClient(base_url=url_of(one)) as http:
            while (reply := await http.get("/ready")).status_code == 200:
                pass
        assert reply.json()["error"]["code"] == "backend_down"
        assert get(one, "/health").status_code == 200


async def test_an_event_loop_that_does_not_run_is_neither_ready_nor_alive(monkeypatch):
    monkeypatch.setattr(health_listener, "_READY_STALE_S", 0.2)
    monkeypatch.setattr(health_listener, "_ALIVE_STALE_S", 0.4)
    async with staged() as stage, listener(stage) as one:
        # The loop does not run between these requests.
        while (alive := get(one, "/health")).status_code == 200:
            pass
        ready = get(one, "/ready")
        for answer, seconds in ((alive, "0.4"), (ready, "0.2")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "event_loop_stalled")
            assert error["message"] == f"the event loop has not run for {seconds} s"
        async with asyncio.timeout(5), httpx.AsyncClient(base_url=url_of(one)) as http:
            while (await http.get("/ready")).status_code != 200:
                pass


async def test_each_path_has_its_own_time_after_which_it_is_stale(monkeypatch):
    feed, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with feed, theirs:
        paths = {
            path: {"response": "fresh", "stale_response": "stale", "stale_s": seconds}
            for path, seconds in (("/ready", 3.0), ("/health", 10.0))
        }
        feed.send(json.dumps({"at_ns": 7_000_000_000, "paths": paths, "unknown": "404"}).encode())
        one = Responder(theirs)
        for now_s, ready, alive in (
            (10, b"fresh", b"fresh"),
            (11, b"stale", b"fresh"),
            (18, b"stale", b"stale"),
        ):
            monkeypatch.setattr(time, "monotonic_ns", lambda now_s=now_s: now_s * 1_000_000_000)
            assert one.response_to(b"GET /ready HTTP/1.1\r\n\r\n") == ready
            assert one.response_to(b"GET /health HTTP/1.1\r\n\r\n") == alive
        assert one.response_to(b"DELETE /health HTTP/1.1\r\n\r\n") == b"404"


async def test_signals_that_end_the_server_leave_it_answering():
    """A terminal sends them to the whole process group; the server drains for a while."""
    async with staged() as stage, listener(stage) as one:
        # It ignores them once it serves.
        assert get(one, "/health").status_code == 200
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(one._process.pid, number)
        assert get(one, "/health").status_code == 200


async def test_a_killed_process_is_started_again(monkeypatch, caplog):
    monkeypatch.setattr(health_listener, "_RESTART_S", 0.0)
    async with staged() as stage, listener(stage) as one:
        killed = one._process
        assert get(one, "/health").status_code == 200
        killed.kill()
        async with asyncio.timeout(10):
            while one._process is killed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert content(get(one, "/ready")) == (200, {"status": "ready"})
    assert "server.health_port ended with status -9" in caplog.text


async def test_its_process_and_its_socket_end_with_it():
    async with staged() as stage:
        async with listener(stage) as one:
            url = url_of(one)
            # A stopped process must not delay the end of the server.
            os.kill(one._process.pid, signal.SIGSTOP)
        assert one._process.returncode == -signal.SIGKILL
        with pytest.raises(httpx.ConnectError):
            get_url(f"{url}/health")


async def test_clients_that_send_too_much_or_nothing_are_disconnected(monkeypatch):
    async with staged() as stage, listener(stage) as one:
        assert exchange(one, b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000) == b""
        assert exchange(one, b"\r\n\r\n").startswith(b"HTTP/1.1 404 Not Found\r\n")
        with socket.create_connection(address_of(one)) as silent:
            answer = exchange(one, b"GET /health HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nconnection: close\r\n" in answer
            silent.shutdown(socket.SHUT_WR)
            assert silent.recv(1) == b""


def test_the_process_ends_when_the_server_is_killed():
    """Nothing tells it so but the end of the feed."""
    feed, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with socket.create_server(("127.0.0.1", 0)) as listener_socket, theirs:
        feed.send(b'{"at_ns": 0, "paths": {}, "unknown": "HTTP/1.1 404 Not Found\\r\\n\\r\\n"}')
        descriptors = (listener_socket.fileno(), theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", health_responder.__file__, *map(str, descriptors)],
            pass_fds=descriptors,
        )
    feed.close()
    assert process.wait(20) == 0
