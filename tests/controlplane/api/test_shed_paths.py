"""What overload sheds: requests to endpoints with a body and no others, by their wait for the event loop."""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing

import pytest

from controlplane.api.load_shedding import LoadShedder
from controlplane.api.openapi import _BODIES
from controlplane.api.post_endpoint import _Endpoint
from controlplane.api.protocol.path_kinds import KIND_OF_PATH
from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Kind
from tests.controlplane.api.scripted_server import staged
from tests.controlplane.api.test_http_protocol import GET, block, hosted, post, until


@pytest.fixture
def offered(monkeypatch) -> Iterator[list[Kind]]:
    """Kinds of the requests for which the shedder is asked; it rejects them."""
    kinds: list[Kind] = []

    def sheds(_: LoadShedder, kind: Kind, delay: Duration, now: Instant, target: Duration) -> bool:
        kinds.append(kind)
        return True

    monkeypatch.setattr(LoadShedder, "sheds", sheds)
    yield kinds


async def test_every_endpoint_with_a_body_is_shed_and_counted_by_its_kind(offered: list[Kind]):
    async with hosted() as host:
        for path in KIND_OF_PATH:
            for target in (path, f"{path}?a=b"):
                async with host.wire() as wire:
                    wire.send(post(path=target.encode()))
                    reply = await wire.reply()
                assert (reply.status, reply.error["code"]) == (429, "overloaded"), target
    assert offered == [kind for kind in KIND_OF_PATH.values() for _ in range(2)]
    assert KIND_OF_PATH["/rerank"] is KIND_OF_PATH["/v1/embeddings"] is Kind.EMBED
    assert KIND_OF_PATH["/tokenize"] is KIND_OF_PATH["/v1/chat/completions"] is Kind.GENERATE


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/models", 200),
        (b"GET /health", 200),
        (b"GET /metrics", 200),
        (b"GET /rerank", 405),
        (b"POST /reranked", 404),
        (b"POST /admin/drain", 403),
    ],
)
async def test_other_requests_are_not(offered: list[Kind], line: bytes, status: int):
    async with hosted() as host, host.wire() as wire:
        wire.send(line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        assert (await wire.reply()).status == status
    assert offered == []


async def test_the_table_has_every_endpoint_with_a_body_and_no_other_path():
    async with staged() as stage:
        routes = stage.app.routes
    found = {route.path for route in routes if isinstance(getattr(route, "endpoint", None), _Endpoint)}
    assert found == KIND_OF_PATH.keys() == _BODIES.keys()


async def test_a_request_that_is_shed_gets_the_overload_status_and_retry_after(monkeypatch):
    delays: list[int] = []

    def sheds(shedder: LoadShedder, kind: Kind, delay: Duration, now: Instant, target: Duration) -> bool:
        delays.append(delay)
        shedder._on_shed(kind)
        return True

    monkeypatch.setattr(LoadShedder, "sheds", sheds)
    async with hosted(overload_status=503) as host, host.wire() as wire:
        wire.send(GET)
        assert (await wire.reply()).status == 200
        wire.send(post())
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1" and "connection" not in reply.headers
        wire.send(GET)
        assert (await wire.reply()).status == 200
        with closing(socket.create_connection(host.address)) as late:
            late.sendall(post())
            block(0.2)
            await until(lambda: len(delays) == 2)
        assert delays[1] >= 150e6
        with closing(socket.create_connection(host.address)) as embedding:
            embedding.sendall(post(path=b"/v1/embeddings"))
            await until(lambda: len(delays) == 3)
        metrics = host.stage.service.status.metrics
        labels = {"class": "unread", "outcome": "rejected"}
        shed = [
            metrics.registry.get_sample_value("tandem_requests_total", labels | {"kind": kind})
            for kind in ("generate", "embed")
        ]
        assert shed == [2, 1] and metrics._shed._value.get() == 3
        assert not host.stage.generator.runs


async def test_a_page_of_a_listed_origin_may_read_that_a_request_was_shed(offered: list[Kind]):
    ours, other = b"https://app.example.com", b"https://else.example"
    allowed = []
    async with hosted(cors=[ours.decode()]) as host, host.wire() as wire:
        for origin in (b"origin: " + ours, b"origin: " + other, b"x-none: 1"):
            wire.send(post({}, origin))
            reply = await wire.reply()
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            allowed.append(reply.headers.get("access-control-allow-origin"))
            if origin.endswith(ours):
                assert "retry-after" in reply.headers["access-control-expose-headers"]
    assert allowed == [ours.decode(), None, None]


async def test_the_turn_among_requests_that_were_read_together_counts(monkeypatch):
    """A late event loop reads all kept-alive connections that are ready before it runs the first of them."""
    delays: list[int] = []

    def sheds(shedder: LoadShedder, kind: Kind, delay: Duration, now: Instant, target: Duration) -> bool:
        delays.append(delay)
        block(0.1)
        return True

    monkeypatch.setattr(LoadShedder, "sheds", sheds)
    async with hosted() as host, AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(host.wire()) for _ in range(4)]
        for wire in wires:
            wire.send(GET)
            assert (await wire.reply()).status == 200
        for wire in wires:
            wire.send(post())
        for wire in wires:
            assert (await wire.reply()).status == 429
    assert max(delays) - min(delays) >= 250e6, delays
