"""Which requests may be rejected before they are parsed: those to endpoints with a body, and no others."""

from collections.abc import Iterator

import pytest

from controlplane.api.load_shedding import LoadShedder
from controlplane.api.openapi import _BODIES
from controlplane.api.post_endpoint import _Endpoint
from controlplane.api.protocol.path_kinds import KIND_OF_PATH
from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Kind
from tests.controlplane.api.scripted_server import staged
from tests.controlplane.api.test_http_protocol import hosted, post


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
