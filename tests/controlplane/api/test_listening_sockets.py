"""The port is bound before the parts of the server are imported that take longer than all before them."""

import asyncio
import socket
import subprocess
import sys

import pytest

from controlplane.api.graceful_server import Hosting
from controlplane.api.listening_sockets import listening
from controlplane.config import ConfigError
from tests.controlplane.api.scripted_server import listens
from tests.controlplane.api.test_startup import hosted

pytestmark = pytest.mark.long


def test_what_binds_the_port_imports_no_server():
    late = ["fastapi", "uvicorn", "apscheduler", "controlplane.service", "backends", "predictors"]
    program = f"""
import sys
import controlplane.cli, controlplane.api.listening_sockets
print([name for name in {late} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_client_that_connects_before_the_server_runs_is_answered():
    sockets = listening("127.0.0.1", 0)
    address = sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
    async with hosted(Hosting(sockets=sockets)):
        assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 503 Service Unavailable\r\n"
        writer.close()
    assert not await listens(address[1])


def test_an_address_that_a_name_has_twice_is_bound_once(monkeypatch):
    known = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: known * 2)
    with listening("localhost", 0)[0] as first:
        port = first.getsockname()[1]
        known[:] = [(*one[:4], ("127.0.0.1", port)) for one in known]
        with pytest.raises(ConfigError, match=f"server.port={port}: Address already in use; stop"):
            listening("localhost", port)
    (again,) = listening("localhost", port)
    again.close()
