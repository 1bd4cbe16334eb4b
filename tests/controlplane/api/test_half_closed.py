"""A client that shuts down its sending side counts as gone, as after close(), which looks the same."""

from typing import Any

import pytest

from controlplane.core.request import Owner
from tests.controlplane.api.test_failures import ended
from tests.controlplane.api.test_http_protocol import CHAT, hosted, post, until


@pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": True}], ids=["whole", "stream"])
async def test_its_request_is_aborted_and_the_connection_closed_without_an_answer(body: dict[str, Any]):
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(body))
        await host.stage.generator.until_runs(1)
        wire.writer.write_eof()
        assert await wire.is_closed()
        await until(lambda: ended(host.stage, "generate", "aborted") == 1)
        assert host.stage.service.status.ledger.held(Owner.LLM) == 0


async def test_a_stream_that_has_begun_ends_in_the_middle():
    async with hosted(is_stepped=True) as host, host.wire() as wire:
        wire.send(post(CHAT | {"stream": True}))
        await host.stage.generator.until_runs(1)
        host.stage.generator.allow(1)
        await wire.reader.readuntil(b"data: ")
        wire.writer.write_eof()
        assert b"[DONE]" not in await wire.reader.read()
        await until(lambda: ended(host.stage, "generate", "aborted") == 1)
