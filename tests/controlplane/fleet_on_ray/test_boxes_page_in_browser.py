"""The page over the boxes of a fleet in Chromium: what boxes report is seen, and what they do not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controlplane.fleet_on_ray.load_polls import BoxState
from tests.chromium import launch_options
from tests.controlplane.api.scripted_server import listening
from tests.controlplane.fleet_on_ray.test_boxes_page import STATES, page, report

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

pytestmark = pytest.mark.browser


@asynccontextmanager
async def opened(states: list[BoxState], *, width: int = 1440, scheme: str = "dark") -> AsyncIterator[Any]:
    """The unlocked page; fails if it logs an error or calls another address."""
    noise: list[str] = []
    async with listening(page(states)) as url, playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(**launch_options())
        context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        shown = await context.new_page()
        shown.set_default_timeout(10_000)
        shown.on("pageerror", lambda error: noise.append(str(error)))
        shown.on("request", lambda asked: asked.url.startswith(url) or noise.append(asked.url))
        await shown.goto(f"{url}/fleet")
        await shown.get_by_label("Key").fill("admin")
        await shown.get_by_role("button", name="Open").click()
        await shown.locator("#boxes tbody tr").first.wait_for()
        yield shown
        assert noise == []
        await browser.close()


async def test_boxes_are_shown_with_their_reports_the_silent_one_first() -> None:
    async with opened(STATES) as shown:
        assert await shown.locator("#models").inner_text() == "2 of 3 boxes answer"
        rows = await shown.locator("#boxes tbody tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == ["10.0.0.2:30000", "10.0.0.3:30001", "10.0.0.1:30000"]
        assert "no answer" in rows[0]
        for text in (
            "search",
            "serves",
            "90 %",
            "chat 50.0 %",
            "LLM 120 ms to 3.40 s",
            "LLM 250 ms",
            "LLM 3.00 GiB",
        ):
            assert text in rows[1], rows[1]
        cards = await shown.locator("#classes .card").all_inner_texts()
        assert [card.split("\n")[0] for card in cards] == ["Kind both", "Kind search", "chat"]
        assert "1/2" in cards[0] and "72.5 %" in cards[2] and "worst box 50.0 %" in cards[2]
        assert await shown.locator("#cells a").count() == 3
        link = shown.locator("#boxes tbody a").nth(1)
        assert await link.get_attribute("href") == "http://10.0.0.3:30001/-tandem/search/dashboard/"


async def test_changes_are_seen_and_sorted_as_asked() -> None:
    states = list(STATES)
    async with opened(states) as shown:
        states[1] = BoxState("b", STATES[1].url, report(0.99, 0.4, serves=False))
        await shown.get_by_text("3 of 3 boxes answer").wait_for()
        await shown.get_by_text("no model", exact=True).wait_for()
        await shown.get_by_role("button", name="Most missed").click()
        first = shown.locator("#boxes tbody th").first
        assert await first.inner_text() == "10.0.0.2:30000"
        await shown.get_by_role("button", name="Name").click()
        assert await first.inner_text() == "10.0.0.1:30000"
        # A reading a second later does not take the focus away.
        link = shown.locator("#boxes tbody a").first
        await link.focus()
        states[2] = BoxState("c", STATES[2].url, None)
        await shown.get_by_text("2 of 3 boxes answer").wait_for()
        assert await link.evaluate("link => link === document.activeElement")


async def test_without_the_key_nothing_is_shown() -> None:
    async with opened(STATES) as shown:
        await shown.get_by_role("button", name="Forget key").click()
        await shown.get_by_label("Key").fill("other")
        await shown.get_by_role("button", name="Open").click()
        await shown.get_by_text("unknown admin key").wait_for()
        assert await shown.locator("#board").is_hidden()


async def test_a_phone_scrolls_the_table_and_nothing_else() -> None:
    async with opened(STATES, width=390, scheme="light") as shown:
        assert await shown.evaluate("document.documentElement.scrollWidth") <= 390
