"""A request that a box takes along when it dies ends with a stated error, on reused connections too.

HAProxy has the configuration that Ray Serve writes, with Tandem's rules; box and router are sockets.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.controlplane.api.scripted_server import listening
from tests.controlplane.fleet_on_ray.ray_marks import NEEDS_RAY
from tests.controlplane.fleet_on_ray.test_data_path import full_id, running_haproxy

pytestmark = NEEDS_RAY

BODY = b"{}"


@dataclass
class SocketBox:
    """Answers each request with 200 or, once `is_dying`, ends its connection; counts the requests it read."""

    is_dying: bool = False
    requests: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    await reader.readexactly(len(BODY))
                    self.requests.append(head)
                    if self.is_dying:
                        return
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            # HAProxy has closed the connection.
            return
        finally:
            writer.close()


@dataclass
class OneBox:
    """A fleet of one box, whose URL is that of HAProxy."""

    box: SocketBox
    listener: asyncio.Server
    url: str


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[OneBox]:
    async def choose(request: Request) -> JSONResponse:
        return JSONResponse({"replica_id": full_id("box", "first")})

    box, router = SocketBox(), Starlette(routes=[Route("/internal/route", choose, methods=["POST"])])
    async with await asyncio.start_server(box.serve, "127.0.0.1", 0) as listener, listening(router) as asked:
        port = listener.sockets[0].getsockname()[1]
        boxes = {"box": {"first": f"http://127.0.0.1:{port}"}}
        async with running_haproxy(tmp_path, boxes, asked) as url:
            yield OneBox(box, listener, url)


@asynccontextmanager
async def client_after_an_answer(fleet: OneBox, *, is_other: bool) -> AsyncIterator[httpx.AsyncClient]:
    """A client after an answer to it, or to another one whose connection to the box HAProxy could take."""
    async with httpx.AsyncClient(trust_env=False) as http, httpx.AsyncClient(trust_env=False) as other:
        async with asyncio.timeout(5):
            # On a busy machine a health check may fail at first.
            while (await (other if is_other else http).post(fleet.url, content=BODY)).is_error:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        fleet.box.requests.clear()
        yield http


@pytest.mark.parametrize("side", ["client", "box"])
async def test_a_request_that_may_have_started_ends_with_a_502_and_is_not_repeated(
    fleet: OneBox, side: str
) -> None:
    """HAProxy would end it without a status if that side's connection had an answer before."""
    async with client_after_an_answer(fleet, is_other=side == "box") as http:
        fleet.box.is_dying = True
        answer = await http.post(fleet.url, content=BODY)
    assert answer.status_code == 502 and answer.text
    assert len(fleet.box.requests) == 1


async def test_a_request_that_no_box_took_ends_with_a_503_and_retry_after(fleet: OneBox) -> None:
    """The box refuses the connection, before the health checks know."""
    async with client_after_an_answer(fleet, is_other=False) as http:
        fleet.listener.close()
        answer = await http.post(fleet.url, content=BODY)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "2")
