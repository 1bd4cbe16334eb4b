"""A client that closes its connection within its request's body."""

import logging
from hashlib import sha256

import pytest

from tests.controlplane.api.test_http_protocol import hosted, until

DIGEST = sha256(b"root").hexdigest()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/admin/config"),
        ("POST", "/admin/explain"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
    ],
)
async def test_it_is_not_logged_as_a_fault_of_the_server(method: str, path: str, caplog):
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer root\r\ncontent-length: 100\r\n\r\n"
    async with hosted(admin_key_sha256=DIGEST) as host:
        async with host.wire() as wire:
            wire.send(head.encode(), b"{")
            await until(lambda: len(host.server.server_state.tasks) == 1)
        await until(lambda: not host.server.server_state.tasks)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
