"""Finished responses that clients do not read take a bounded memory together."""

import asyncio
import socket
from contextlib import ExitStack, closing, suppress

from backends.testing.scripted import Script
from controlplane.api.unread_responses import UnreadResponses
from tests.controlplane.api.scripted_server import until
from tests.controlplane.api.test_http_protocol import hosted, post


class Connection(asyncio.WriteTransport):
    """A connection with so many unsent bytes."""

    def __init__(self, unsent: int) -> None:
        super().__init__()
        self.unsent = unsent
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_closed = True


def held(unread: UnreadResponses, *sizes: int, most: int = 100) -> list[Connection]:
    connections = [Connection(size) for size in sizes]
    for each in connections:
        unread.hold(each, each.unsent, most)
    return connections


async def test_the_connections_that_wait_longest_are_closed():
    first, second, third = held(UnreadResponses(), 40, 50, 60)
    assert (first.is_closed, second.is_closed, third.is_closed) == (True, True, False)


async def test_the_newest_is_kept_whatever_its_size():
    first, second = held(UnreadResponses(), 10, 1_000)
    assert (first.is_closed, second.is_closed) == (True, False)


async def test_what_was_read_or_has_ended_does_not_count():
    unread = UnreadResponses()
    read, ended, waits = held(unread, 50, 40, 10)
    read.unsent = 5
    unread.hold(ended, 0, 100)
    (last,) = held(unread, 85)
    assert not any(each.is_closed for each in (read, ended, waits, last))
    (last,) = held(unread, 1)
    assert [each.is_closed for each in (read, ended, waits, last)] == [True, False, False, False]


async def test_a_response_on_a_connection_that_was_held_is_new():
    unread = UnreadResponses()
    kept_alive, other = held(unread, 50, 40)
    unread.hold(kept_alive, 50, 100)
    held(unread, 20)
    assert (kept_alive.is_closed, other.is_closed) == (False, True)


async def test_a_client_that_reads_nothing_loses_its_response_when_others_need_the_memory():
    loop = asyncio.get_running_loop()
    async with hosted(limits={"body_memory": 3_000_000}) as host:
        generator, connections = host.stage.generator, host.server.server_state.connections
        generator.default = Script(tokens=200, words=("x" * 100_000,))

        async def ask(client: socket.socket, number: int) -> None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(host.address)
            client.setblocking(False)
            await loop.sock_sendall(client, post())
            await generator.until_runs(number)
            async with asyncio.timeout(10):
                await generator.runs[number - 1].ended.wait()

        async def read(client: socket.socket) -> int:
            size = 0
            # The end of the connection may be a reset.
            with suppress(ConnectionResetError):
                async with asyncio.timeout(10):
                    while size < 20_000_000 and (part := await loop.sock_recv(client, 2**20)):
                        size += len(part)
            return size

        with ExitStack() as stack:
            first, second = (stack.enter_context(closing(socket.socket())) for _ in range(2))
            await ask(first, 1)
            assert len(connections) == 1
            await ask(second, 2)
            await until(lambda: len(connections) == 1)
            assert await read(first) < 20_000_000
            assert await read(second) >= 20_000_000
