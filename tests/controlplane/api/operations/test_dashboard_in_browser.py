"""The dashboard in Chromium on a served application: what happens in the service is seen on the page."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from backends.testing.scripted import Script
from tests.chromium import launch_options
from tests.controlplane.api.operations.test_admin import ADMIN, SETTINGS
from tests.controlplane.api.scripted_server import (
    CHAT_MODEL,
    EMBED_MODEL,
    MAX_RUNNING,
    Stage,
    at_a_slow_pace,
    listening,
    staged,
    until,
)

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

pytestmark = pytest.mark.browser

CLASSES = {
    "interactive": {"priority": 5, "ttft_ms": 5_000, "default": True},
    "batch": {"priority": 0, "sheddable": False},
}
CHAT = "/v1/completions"
# Charts are drawn on canvases: how many pixels of each have a color.
_DRAWN = """() => [...document.querySelectorAll('[data-chart] canvas')].map((canvas) => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let at = 3; at < pixels.length; at += 4) drawn += pixels[at] > 0;
  return [canvas.closest('[data-chart]').dataset.chart, drawn];
})"""
_PERIOD_MS = 500
_CHARTS = {"memory", "device", "ttft", "queue", "attainment"}


@asynccontextmanager
async def dashboard(
    stage: Stage,
    *,
    scheme: str = "dark",
    width: int = 1440,
    prefix: str = "",
    is_paused: bool = False,
    refused: Sequence[int] = (),
) -> AsyncIterator[Any]:
    """The unlocked page below a path prefix; fails if the page logs an error or calls another address.

    `refused` are the statuses that the server answers the page with. With `is_paused` the page's clock
    stands still once it is unlocked; `next_answer` moves it on.
    """
    options, noise = launch_options(), []
    app = Starlette(routes=[Mount(prefix, stage.app)]) if prefix else stage.app
    async with listening(app) as url, playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(**options)
        context = await browser.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=scheme, base_url=url
        )
        page = await context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(url + prefix) or noise.append(asked.url))
        if is_paused:
            await page.clock.install()
        await page.goto(f"{prefix}/dashboard")
        if is_paused:
            # Without the key the page asks no more, so from here on it asks only when a test says so.
            await page.get_by_label("Key", exact=True).wait_for()
            await page.clock.pause_at(await page.evaluate("Date.now()") / 1_000 + 1)
            stage.service.live.sample()
        await page.get_by_label("Key", exact=True).fill("root")
        await page.get_by_role("button", name="Open").click()
        await page.locator("#state[data-state=live]").wait_for()
        yield page
        await browser.close()
    # Chromium reports refusals; that of the first answer asks for the key.
    reported = [f"status of {status} " for status in (401, *refused)]
    assert [text for text in noise if not any(each in text for each in reported)] == []


async def next_answer(page: Any) -> None:
    """Lets `_PERIOD_MS` pass for the page, and waits until it has shown what the feed then answers."""
    before = await page.locator("#board").get_attribute("data-answers")
    await page.clock.run_for(_PERIOD_MS)
    await page.locator(f"#board:not([data-answers='{before}'])").wait_for()


def body(**more: object) -> dict[str, object]:
    return {"model": CHAT_MODEL, "prompt": "Hello", **more}


async def marks(page: Any) -> set[str]:
    """The marks of the charts, which are the same on each."""
    shown = await page.evaluate(
        "[...document.querySelectorAll('[data-chart]')].map((one) => one.dataset.marks)"
    )
    assert len(shown) == len(_CHARTS)
    return set(shown)


async def stepped(stage: Stage, asking: list[asyncio.Task[httpx.Response]]) -> list[int]:
    while not all(task.done() for task in asking):
        stage.generator.allow()
        await asyncio.sleep(0)
    return [task.result().status_code for task in asking]


async def test_a_preemption_a_rejection_and_a_restart_are_seen():
    sections = {"classes": CLASSES, "admission": {"engine_queue": 0, "max_waiting": 2}}
    async with (
        staged(SETTINGS, is_stepped=True, **sections) as stage,
        dashboard(stage, is_paused=True) as page,
    ):
        stage.generator.default = Script(tokens=60)

        def ask(name: str, service_class: str, tokens: int = 60) -> asyncio.Task[httpx.Response]:
            headers = {"x-request-id": name, "x-service-class": service_class}
            return asyncio.create_task(stage.http.post(CHAT, json=body(max_tokens=tokens), headers=headers))

        batch = [ask(f"batch-{n}", "batch") for n in range(MAX_RUNNING)]
        await stage.generator.until_runs(MAX_RUNNING)
        await at_a_slow_pace(stage)
        urgent = [ask("urgent", "interactive", 3)]
        await stage.generator.until_runs(MAX_RUNNING + 1)
        await next_answer(page)
        row = page.locator("#rows-preemptions .event").first
        assert await row.is_visible()
        assert "batch-" in await row.inner_text() and "urgent" in await row.inner_text()
        assert "tokens again" in await row.inner_text()
        waiting = [ask(f"late-{n}", "batch") for n in range(2)]
        await until(lambda: any(task.done() for task in waiting))
        await next_answer(page)
        rejected = page.locator("#rows-decisions .event", has_text="queue is full")
        assert await rejected.first.is_visible()
        statuses = await stepped(stage, batch + urgent + waiting)
        assert sorted(statuses) == [200] * 6 + [429]

        await rejected.first.get_by_role("link").click()
        panel = page.get_by_role("complementary")
        await panel.get_by_text("rejected", exact=True).first.wait_for()
        explained = await panel.inner_text()
        assert "queue is full" in explained and "First token" not in explained
        await page.keyboard.press("Escape")
        await panel.wait_for(state="hidden")

        stage.generator.die("killed by the test")
        await until(lambda: b'"state":"up"' in stage.service.live.since(0, "test"))
        stage.service.live.sample()
        await next_answer(page)
        happened = page.locator("#rows-happenings .event")
        assert await happened.filter(has_text="killed by the test").first.is_visible()
        assert await happened.filter(has_text="serves again").first.is_visible()
        assert await marks(page) == {"engine down, engine up"}


async def test_a_quota_move_a_change_and_a_fault_are_seen():
    quota = {"tick_ms": 10_000}
    classes = {**CLASSES, "late": {"ttft_ms": 0.001, "sheddable": False}}
    sections = {"classes": classes, "pool": {"kv_allocator": "kvcached"}, "quota": quota}
    async with (
        staged(SETTINGS, is_stepped=True, **sections) as stage,
        dashboard(stage, is_paused=True) as page,
    ):
        headers = {"x-service-class": "late"}
        late = asyncio.create_task(stage.http.post(CHAT, json=body(max_tokens=60), headers=headers))
        await stage.generator.until_runs(1)
        stage.service.quota_controller.withhold(3 << 20)
        await stage.service.quota_controller.tick_now()
        stage.service.live.sample()
        await next_answer(page)
        move = await page.locator("#rows-quotas .event").first.inner_text()
        assert "LLM 1.00" in move and "Embedding 0.00" in move
        assert await stepped(stage, [late]) == [200]
        change = {"scheduling": {"ordering": "fcfs"}}
        assert (await stage.http.put("/admin/config", json=change, headers=ADMIN)).status_code == 200
        stage.service.live.sample()
        await next_answer(page)
        row = page.locator("#rows-happenings .event", has_text="version 2")
        assert "scheduling.ordering: none → fcfs" in await row.inner_text()
        assert await marks(page) == {"v2"}
        bad = {"classes": {"late": {"ttft_ms": -1}}}
        assert (await stage.http.put("/admin/config", json=bad, headers=ADMIN)).status_code == 400
        stage.service.live.sample()
        await next_answer(page)
        banner = page.locator("#faults p[data-part=configuration]")
        assert "the change by PUT /admin/config failed, and version 2" in await banner.inner_text()
        stage.service.gate.dispatcher.health.failed(RuntimeError("made by the test"))
        stage.service.live.sample()
        await next_answer(page)
        banner = page.locator("#faults p", has_text="requests fail without a decision: made by the test")
        assert await banner.is_visible()
        stage.service.gate.dispatcher.health.succeeded()
        stage.service.live.sample()
        await next_answer(page)
        assert await banner.count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390], ids=["desk", "phone"])
async def test_every_chart_is_drawn_and_nothing_overflows(scheme: str, width: int):
    async with staged(SETTINGS, classes=CLASSES) as stage:
        for _ in range(3):
            await stage.http.post(CHAT, json=body())
            await stage.http.post("/v1/embeddings", json={"model": EMBED_MODEL, "input": "x"})
        async with dashboard(stage, scheme=scheme, width=width) as page:
            await page.get_by_role("button", name="1 min").click()
            assert await page.locator(".card").count() == len(CLASSES)
            drawn = dict(await page.evaluate(_DRAWN))
            assert drawn.keys() == _CHARTS and min(drawn.values()) > 100
            judged = await page.locator(".calibration h3").all_inner_texts()
            assert {"FIRST TOKEN", "ENGINE STEP", "EMBEDDING PASS"} <= {name.upper() for name in judged}
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            bars = "[...document.querySelectorAll('.calibration .scale')].map((bar) => bar.clientWidth)"
            assert min(await page.evaluate(bars)) >= 70
            # It took 330 px.
            empty = await page.locator("#rows-quotas").bounding_box()
            assert empty["height"] < 100
            await page.locator(".card", has_text="interactive").click()
            assert await page.locator(".card[aria-pressed=true] .name").inner_text() == "interactive"


async def test_the_page_works_below_a_path_prefix():
    async with staged(SETTINGS) as stage, dashboard(stage, prefix="/gpu-7/tandem") as page:
        assert page.url.endswith("/gpu-7/tandem/dashboard/")
        await page.goto("/gpu-7/tandem/")
        await page.get_by_role("link", name="Dashboard").click()
        await page.locator("#state[data-state=live]").wait_for()


async def test_a_wrong_key_is_refused_and_not_kept():
    async with staged(SETTINGS) as stage, dashboard(stage) as page:
        await page.get_by_role("button", name="Forget key").click()
        await page.get_by_label("Key", exact=True).fill("wrong")
        await page.get_by_role("button", name="Open").click()
        await page.get_by_text("unknown admin key").wait_for()
        assert await page.evaluate("sessionStorage.getItem('tandem-admin-key')") is None
        assert await page.locator("#board").is_hidden()


async def test_an_address_with_the_key_opens_the_page_and_does_not_keep_it():
    """Typed into a tab that shows the page already, it loads nothing."""
    async with staged(SETTINGS) as stage, dashboard(stage) as page:
        await page.get_by_role("button", name="Forget key").click()
        await page.get_by_label("Key", exact=True).wait_for()
        opened = page.url
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.evaluate("location.hash = 'key=root'")
        await page.locator("#state[data-state=live]").wait_for()
        assert page.url == opened
        await page.evaluate("sessionStorage.clear()")
        await page.goto("about:blank")
        await page.goto(f"{opened.removesuffix('/')}#key=root")
        await page.locator("#state[data-state=live]").wait_for()
        assert page.url == opened
        assert asked and "root" not in " ".join(asked)


async def test_the_window_fits_the_samples_until_one_is_chosen():
    async with staged(SETTINGS) as stage, dashboard(stage, is_paused=True) as page:
        chosen = page.locator("#window [aria-pressed=true]")
        assert await chosen.inner_text() == "1 min"
        await page.get_by_role("button", name="5 min", exact=True).click()
        stage.service.live.sample()
        await next_answer(page)
        assert await chosen.inner_text() == "5 min"
