"""Probes are answered before the server's event loop runs, and other connections wait for it."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmark_control_plane.common.servers import free_port
from controlplane.api.early_probes import PLANNING, RETRY_SECONDS, EarlyProbeServer
from controlplane.api.errors import starting_failure
from controlplane.api.graceful_server import Hosting
from controlplane.api.listening_sockets import listening
from controlplane.cli import main
from controlplane.config import ConfigError
from tests.controlplane.api.test_startup import hosted

pytestmark = pytest.mark.long


def get(port: int, path: str) -> tuple[int, dict, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def test_readiness_names_the_memory_plan_while_it_is_made(tmp_path: Path, monkeypatch, capsys):
    """The plan is made in this thread, which then asks the server."""
    pytest.importorskip("sentence_transformers")
    port, health_port = free_port(), free_port()
    found = []

    def assemble(config):
        found.extend(get(each, path) for each in (port, health_port) for path in ("/ready", "/health"))
        raise ConfigError("that is all")

    monkeypatch.setattr("controlplane.service.bootstrap.assemble", assemble)
    monkeypatch.setattr("controlplane.cli.set_up_logging", lambda section: None)
    monkeypatch.setattr("controlplane.cli.set_engine_log_level", lambda level: None)
    file = tmp_path / "my.yaml"
    file.write_text(
        f"server: {{health_port: {health_port}}}\nmodels: {{embeddings: [{{model: m}}]}}\n", encoding="utf-8"
    )
    assert main(["serve", str(file), "--port", str(port)]) == 2
    assert capsys.readouterr().err == "that is all\n"
    for (status, headers, body), health in (found[:2], found[2:]):
        assert (status, headers["retry-after"], body["status"], body["parts"]) == (503, "5", "starting", {})
        assert headers["retry-after-ms"] == "5000"
        stated = json.loads(starting_failure(f"{PLANNING} for {body['seconds']:.1f} s").body)
        assert body["error"] == stated["error"]
        assert (health[0], health[2]) == (200, {"status": "alive"})


def test_the_time_to_retry_is_that_of_the_server():
    assert starting_failure("").headers["retry-after"] == str(RETRY_SECONDS)


async def test_other_connections_are_answered_by_the_server_with_what_they_have_sent():
    sockets = listening("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with EarlyProbeServer(sockets).serving() as early:
        asking = socket.create_connection(("127.0.0.1", port), timeout=10)
        asking.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        silent = socket.create_connection(("127.0.0.1", port), timeout=10)
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        # In a thread of its own, which signals nothing here.
        async with asyncio.timeout(10):
            while len(early.kept) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    async with hosted(Hosting(sockets=sockets, connections=early.kept)):
        silent.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/health")).status_code == 200
        assert b'"version"' in await asyncio.to_thread(received, asking)
        assert b'"alive"' in await asyncio.to_thread(received, silent)


def received(connection: socket.socket) -> bytes:
    with connection:
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
        return b"".join(parts)


async def test_the_health_port_has_answers_to_probes_only_before_the_event_loop_runs_and_after():
    sockets, probe_sockets = listening("127.0.0.1", 0), listening("127.0.0.1", 0)
    port = probe_sockets[0].getsockname()[1]
    with EarlyProbeServer(sockets, probe_sockets).serving() as early:
        first = get(port, "/v1/models")
        assert get(port, "/ready?verbose=1")[0] == 503
        with socket.create_connection(probe_sockets[0].getsockname(), timeout=10) as connection:
            connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
            head = received(connection)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n")
    assert early.kept == []
    hosting = Hosting(sockets=sockets, probe_sockets=probe_sockets)
    async with hosted(hosting, server={"health_port": port}) as host, asyncio.timeout(10):
        assert (await host.http.get(f"http://127.0.0.1:{port}/ready")).json()["status"] == "starting"
        later = await host.http.get(f"http://127.0.0.1:{port}/v1/models")
        assert (later.status_code, later.json()) == (404, first[2]) == (first[0], first[2])


def test_clients_of_the_server_do_not_delay_probes_on_the_health_port():
    """On its own port each silent client takes half a second."""
    sockets, probe_sockets = listening("127.0.0.1", 0), listening("127.0.0.1", 0)
    with ExitStack() as open_connections:
        for _ in range(20):
            open_connections.enter_context(socket.create_connection(sockets[0].getsockname()))
        with EarlyProbeServer(sockets, probe_sockets).serving() as early:
            assert get(probe_sockets[0].getsockname()[1], "/health")[0] == 200
            assert len(early.kept) < 20
    for one in (*sockets, *probe_sockets, *early.kept):
        one.close()


def test_a_client_that_never_asks_does_not_stop_the_start():
    sockets = listening("127.0.0.1", 0)
    with EarlyProbeServer(sockets).serving(), socket.create_connection(sockets[0].getsockname()) as slow:
        slow.sendall(b"GET /ready HTTP/1.1\r\n")
        assert get(sockets[0].getsockname()[1], "/health")[0] == 200
    for one in sockets:
        one.close()


@pytest.mark.timeout(60)
def test_a_client_that_sends_a_byte_at_a_time_does_not_stop_the_start():
    sockets = listening("127.0.0.1", 0)
    slow = socket.create_connection(sockets[0].getsockname())
    slow.sendall(b"GET /ready HTTP/1.1\r\n")
    done = threading.Event()
    ends = []

    def dribble() -> None:
        while not done.wait(0.05):
            try:
                slow.sendall(b"x")
            except OSError as error:
                ends.append(error)
                return

    sender = threading.Thread(target=dribble)
    with EarlyProbeServer(sockets).serving():
        sender.start()
        assert get(sockets[0].getsockname()[1], "/health")[0] == 200
    sender.join(20)
    done.set()
    assert ends, "the server closed the connection"
    for one in (slow, *sockets):
        one.close()
