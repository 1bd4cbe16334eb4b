"""One asynchronous client in several event loops, with connections that the server keeps open."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from controlplane import sdk


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = b'{"data": [{"id": "one"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_event_loops_may_use_a_client_one_after_another(url: str):
    tandem = sdk.AsyncTandem(url)

    async def twice() -> list[str]:
        return [model.id for _ in range(2) for model in await tandem.models()]

    for _ in range(3):
        assert asyncio.run(twice()) == ["one", "one"]


def test_a_closed_client_stays_closed(url: str):
    tandem = sdk.AsyncTandem(url)

    async def use_and_close() -> None:
        await tandem.models()
        await tandem.aclose()

    asyncio.run(use_and_close())
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(use_and_close())
