"""Time limits of a connection count what the client did, not how late the event loop reads it."""

import asyncio
import socket
import time

import pytest
import uvloop

from tests.controlplane.api.test_http_protocol import GET, hosted, post

LIMIT_S = 0.05


@pytest.mark.parametrize("limit", ["idle", "header", "body"])
def test_bytes_that_arrived_in_time_are_read_by_a_late_loop(limit):
    """uvloop is blocked while it reads, from the request until its limit has passed; its timers come next."""
    uvloop.run(_is_answered(limit))


async def _is_answered(limit: str) -> None:
    request, loop = post(), asyncio.get_running_loop()
    before = {"idle": GET, "header": request[:20], "body": request[:-5]}[limit]
    async with hosted(limits={f"{limit}_timeout_ms": 1e3 * LIMIT_S}) as host:
        trigger, pulled = socket.socketpair()
        with socket.create_connection(host.address) as client, trigger, pulled:
            client.setblocking(False)
            client.send(before)
            if limit == "idle":
                assert (await loop.sock_recv(client, 4_096)).startswith(b"HTTP/1.1 200 ")
            else:
                await asyncio.sleep(LIMIT_S / 5)  # the server has read it and waits for the rest

            def block() -> None:
                trigger.recv(1)
                client.send(request.removeprefix(before))
                time.sleep(2 * LIMIT_S)

            loop.add_reader(trigger, block)
            pulled.send(b"x")
            assert (await loop.sock_recv(client, 4_096)).startswith(b"HTTP/1.1 200 ")
            loop.remove_reader(trigger)
