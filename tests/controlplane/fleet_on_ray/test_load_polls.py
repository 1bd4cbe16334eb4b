"""A router's reports of two boxes that listen on sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

import pytest

from controlplane.api.settings import ApiSettings
from controlplane.fleet.router import RoutedRequest, Router
from controlplane.fleet_on_ray import load_polls
from controlplane.fleet_on_ray.load_polls import LoadPolls
from tests.controlplane.api.scripted_server import CHAT_MODEL, Stage, listening, staged, until

SETTINGS = ApiSettings(router_key_sha256=sha256(b"router").hexdigest())
REQUEST = RoutedRequest(CHAT_MODEL, "standard", 10)


@asynccontextmanager
async def polling(router: Router, key: str = "router") -> AsyncIterator[LoadPolls]:
    polls = LoadPolls(router, key, period=0.01)
    try:
        yield polls
    finally:
        await polls.stop()


async def test_boxes_report_until_they_are_gone() -> None:
    router = Router()
    async with AsyncExitStack() as stack, polling(router) as polls:
        stages: list[Stage] = [await stack.enter_async_context(staged(SETTINGS)) for _ in range(2)]
        async with listening(stages[0].app) as stays, listening(stages[1].app) as leaves:
            polls.set_boxes({"stays": stays, "leaves": leaves}, {})
            await until(lambda: polls.living == {"stays", "leaves"})
            numbers = [report.number for report in router.reports()]
            await until(lambda: [report.number for report in router.reports()] > numbers)
            await stages[1].service.drain()
            await until(lambda: any(not report.models for report in router.reports()))
            choice = router.choose(REQUEST, asyncio.get_running_loop().time(), (0.9, 0.1))
            assert choice is not None
            assert choice.box == "stays"
            # A drained box still answers, and says why it serves nothing.
            assert polls.living == {"stays", "leaves"}
            polls.set_boxes({"stays": stays}, {})
            assert polls.living == {"stays"}
        await until(lambda: not polls.living)
        assert list(router.reports()) == []


async def test_a_box_with_another_key_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    async with (
        staged(SETTINGS) as stage,
        listening(stage.app) as url,
        polling(router, key="other") as polls,
    ):
        await polls._ask("box", url)
        await polls._ask("box", url)
        assert [record.levelname for record in caplog.records if record.name == "tandem.fleet"] == ["WARNING"]
        assert polls.living == frozenset()
        assert list(router.reports()) == []


async def test_boxes_that_hang_do_not_delay_the_polls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than an HTTP client has connections by default."""
    monkeypatch.setattr(load_polls, "TIMEOUT_S", 30.0)
    boxes, opened, all_open = 120, 0, asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        if opened == boxes:
            all_open.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, polling(Router()) as polls:
        port = server.sockets[0].getsockname()[1]
        polls.set_boxes({f"{box}": f"http://127.0.0.1:{port}" for box in range(boxes)}, {})
        async with asyncio.timeout(10):
            await all_open.wait()
        assert polls.living == frozenset()
