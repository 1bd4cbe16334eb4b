"""Serves completions with known delays and reports the delays that it kept, to check a benchmark client.

    python -m benchmark_control_plane.experiments.client_accuracy.scripted_server
        --port 8000 [--first-ms 20] [--gap-ms 4]

The first token of a completion is sent the first delay after the last byte of its request arrived, each
further token the gap after the one before. `GET /truth` returns the medians of both as they were since the
last such request.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, cast

import httptools
import orjson
import uvloop

TRUTH = "/truth"
_COMPLETIONS = b"/v1/completions"
_TOKEN = b'data: {"choices":[{"index":0,"text":"word "}]}\n\n'
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class ServerDelays:
    """Scripted delays in seconds, and the measured ones since the last `GET /truth`."""

    first: float
    gap: float
    first_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)

    def truth(self) -> bytes:
        """JSON with the medians; resets them."""
        medians = {"ttft_ms": median(self.first_ms or [0]), "tpot_ms": median(self.tpot_ms or [0])}
        self.first_ms, self.tpot_ms = [], []
        return orjson.dumps(medians)


class _Connection(asyncio.Protocol):
    def __init__(self, script: ServerDelays) -> None:
        self._script = script
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._responding: asyncio.Task[None] | None = None
        self._path, self._body = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._responding is not None:
            self._responding.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        if self._path == _COMPLETIONS:
            tokens = orjson.loads(self._body)["max_tokens"]
            self._responding = asyncio.create_task(self._respond(tokens, perf_counter()))
        else:
            body = self._script.truth() if self._path == TRUTH.encode() else b""
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async def _respond(self, tokens: int, received: float) -> None:
        script, sent = self._script, []
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        due = received + script.first
        for _ in range(tokens):
            await asyncio.sleep(due - perf_counter())
            self._chunk(_TOKEN)
            sent.append(perf_counter())
            due = sent[-1] + script.gap
        self._chunk(b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % tokens)
        self._chunk(_DONE)
        self._write(b"0\r\n\r\n")
        script.first_ms.append(1e3 * (sent[0] - received))
        if tokens > 1:
            script.tpot_ms.append(1e3 * (sent[-1] - sent[0]) / (tokens - 1))

    def _chunk(self, event: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(event), event))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def listening(script: ServerDelays, port: int) -> asyncio.Server:
    """A started server on 127.0.0.1; port 0 chooses a free one."""
    return await asyncio.get_running_loop().create_server(lambda: _Connection(script), "127.0.0.1", port)


async def _serve(script: ServerDelays, port: int) -> None:
    server = await listening(script, port)
    await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripted_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=4.0)
    options = parser.parse_args(arguments)
    uvloop.run(_serve(ServerDelays(options.first_ms / 1e3, options.gap_ms / 1e3), options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
