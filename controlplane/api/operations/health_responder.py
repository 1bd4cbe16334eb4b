"""Process that answers /health and /ready with what the server published last.

    python -I -S health_responder.py LISTENER... FEED

The arguments are descriptors: listening sockets, and a Unix socket of type SOCK_SEQPACKET with messages of
the server, each of which replaces the one before (`Publication`). The process ends when the server closes the
feed. It imports nothing but the standard library, so that it starts at once and takes little memory, and
it shares neither the interpreter lock nor the event loop of the server.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypedDict

# Connections that the kernel keeps until they are accepted.
_BACKLOG = 1_024
# A probe is one line and a few headers.
_MAX_REQUEST_BYTES = 16_384
_MAX_MESSAGE_BYTES = 1 << 18
_REQUEST_SECONDS = 5.0
# Its requests take little, and must not wait for engines that keep all cores busy.
_NICENESS = -10
# They end the server, which ends this process; until then it answers. A terminal sends them to both.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class ProbeAnswer(TypedDict):
    """The response of a path, and the one that replaces it `stale_s` seconds after its publication."""

    response: str
    stale_response: str
    stale_s: float


class Publication(TypedDict):
    """A message of the server. Responses are whole HTTP responses, after which the connection ends.

    `at_ns` is the time of the publication on the monotonic clock, which all processes of a host share.
    """

    at_ns: int
    paths: dict[str, ProbeAnswer]
    unknown: str


class Responder:
    """Serves what `feed` published last; `ended` is set when the server has closed the feed."""

    def __init__(self, feed: socket.socket) -> None:
        self.ended = asyncio.Event()
        self._feed = feed
        # The server publishes before it starts this process.
        self._published: Publication = json.loads(feed.recv(_MAX_MESSAGE_BYTES))
        feed.setblocking(False)

    async def serve_until_end(self, listeners: Sequence[socket.socket]) -> None:
        """Serves the listening sockets until the server closes the feed."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._feed, self._read_feed)
        servers = [
            await asyncio.start_server(self._serve, sock=one, backlog=_BACKLOG, limit=_MAX_REQUEST_BYTES)
            for one in listeners
        ]
        await self.ended.wait()
        loop.remove_reader(self._feed)
        for server in servers:
            server.close()

    def _read_feed(self) -> None:
        with suppress(BlockingIOError):
            while message := self._feed.recv(_MAX_MESSAGE_BYTES):
                self._published = json.loads(message)
            self.ended.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request; a client that sends none within the limits is disconnected."""
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                writer.write(self.response_to(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client has left, or is slow, or its request is too long: none of them gets a response.
            writer.transport.abort()
        finally:
            writer.close()

    def response_to(self, request: bytes) -> bytes:
        """The response to a request, of which only the first line is read."""
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        answer = self._published["paths"].get(path) if method in (b"GET", b"HEAD") else None
        if answer is None:
            text = self._published["unknown"]
        elif time.monotonic_ns() - self._published["at_ns"] > 1e9 * answer["stale_s"]:
            text = answer["stale_response"]
        else:
            text = answer["response"]
        head, end, body = text.encode().partition(b"\r\n\r\n")
        return head + end if method == b"HEAD" else head + end + body


def main(arguments: Sequence[str]) -> None:
    """Serves until the server closes the feed."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Without the right to do so it waits for a core like the others.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    *listeners, feed = (socket.socket(fileno=int(descriptor)) for descriptor in arguments)
    asyncio.run(Responder(feed).serve_until_end(listeners))


if __name__ == "__main__":
    main(sys.argv[1:])
