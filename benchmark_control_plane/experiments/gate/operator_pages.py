"""Drives the dashboard through the tasks of an operator in Chromium, and takes their images.

Needs Playwright, Pillow and a Chromium (`TANDEM_BROWSER` names another than `chromium`).
"""

import argparse
import asyncio
import io
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmark_control_plane.experiments.gate.operator_servers import ADMIN_KEY, GATE, QUOTAS, STATIC

_SIZE = {"width": 1440, "height": 1180}
_WINDOW_S = 300
_QUALITY = 78
_AFTER_IMPORTS_S = 6.0


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """A started Chromium. Raises RuntimeError if there is none."""
    from playwright.async_api import async_playwright

    path = os.environ.get("TANDEM_BROWSER") or shutil.which("chromium")
    if path is None:
        raise RuntimeError("no Chromium on this machine: install one, or name it in TANDEM_BROWSER")
    async with async_playwright() as driver:
        # Chromium's sandbox does not start as root.
        arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        chromium = await driver.chromium.launch(executable_path=path, args=arguments)
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def _unlocked(chromium: Any, url: str, scheme: str = "dark") -> AsyncIterator[Any]:
    context = await chromium.new_context(viewport=_SIZE, color_scheme=scheme, base_url=url)
    stored = {"tandem-admin-key": ADMIN_KEY, "tandem-window": str(_WINDOW_S)}
    for name, value in stored.items():
        await context.add_init_script(f"sessionStorage.setItem({name!r}, {value!r})")
    try:
        yield await context.new_page()
    finally:
        await context.close()


async def _refused(page: Any) -> Any:
    await page.get_by_role("button", name="Rejected").click()
    await page.locator("#rows-decisions a.who").first.click()
    await page.locator("#explain .badge", has_text="rejected").first.wait_for()
    return None


async def _burn(page: Any) -> Any:
    cards = page.locator("#classes")
    await cards.locator(
        ".burn[data-level=good], .burn[data-level=warn], .burn[data-level=bad]"
    ).first.wait_for()
    return await cards.bounding_box()


async def _steering(page: Any) -> Any:
    await page.get_by_role("button", name="Change", exact=True).click()
    return page.get_by_label("Change the server")


async def _applied(panel: Any, text: str, afterwards: str, minutes: float) -> None:
    """Tries a part of the configuration and applies it."""
    await panel.get_by_label("Part of the configuration", exact=True).fill(text)
    await panel.get_by_label("Afterwards", exact=True).select_option(value=afterwards)
    await panel.get_by_label("Time, minutes", exact=True).fill(f"{minutes:g}")
    await panel.get_by_role("button", name="Try", exact=True).click()
    await panel.get_by_text("Would change", exact=True).wait_for()
    await panel.get_by_role("button", name="Apply").click()
    await panel.get_by_text("is in force").wait_for()


async def _more_quota(page: Any) -> Any:
    panel = await _steering(page)
    await _applied(panel, "quota:\n  llm: {nominal: 0.65}\n  embedding: {nominal: 0.35}", "for", 60)
    return await panel.bounding_box()


async def _more_pacing(page: Any) -> Any:
    panel = await _steering(page)
    await _applied(panel, "scheduling:\n  engine: {decode_pacing: 0.9}", "for", 60)
    return await panel.bounding_box()


async def _guarded_class(page: Any) -> Any:
    panel = await _steering(page)
    await _applied(panel, "classes:\n  batch: {ttft_ms: 45000}", "guard", 5)
    shown = await panel.bounding_box()
    await panel.get_by_role("button", name="Try undoing the last change").click()
    await panel.get_by_text("Would change", exact=True).wait_for()
    await panel.get_by_role("button", name="Apply").click()
    await panel.get_by_text("is in force").wait_for()
    return shown


async def _hypothetical(page: Any) -> Any:
    panel = await _steering(page)
    await panel.get_by_label("Tokens of the prompt or of each input", exact=True).fill("150")
    await panel.get_by_label("Longest output", exact=True).fill("40")
    await panel.get_by_label("Class", exact=True).select_option("interactive")
    decide = panel.get_by_role("button", name="Decide")
    await decide.click()
    await panel.locator(".outcome .badge").wait_for()
    await decide.scroll_into_view_if_needed()
    return await panel.bounding_box()


async def _drained(page: Any) -> Any:
    panel = await _steering(page)
    await panel.get_by_role("button", name="Drain…").click()
    await panel.get_by_role("button", name="Drain now").click()
    await panel.get_by_text("Drained: no request runs.").wait_for()
    await panel.get_by_text("Drained: no request runs.").scroll_into_view_if_needed()
    return await panel.bounding_box()


async def _change(page: Any) -> Any:
    row = page.locator("#rows-happenings .event", has_text="version 2")
    await row.wait_for()
    return await page.locator("#charts").bounding_box()


async def _preempted(page: Any) -> Any:
    panel = page.locator("#table-preemptions")
    await panel.locator(".event").first.wait_for()
    await panel.scroll_into_view_if_needed()
    return await panel.bounding_box()


async def _limit(page: Any) -> Any:
    for name in ("memory", "device"):
        await page.locator(f"#chart-{name} canvas").first.wait_for()
    memory, device = [await page.locator(f"#chart-{name}").bounding_box() for name in ("memory", "device")]
    return {**memory, "width": device["x"] + device["width"] - memory["x"]}


async def _forecasts(page: Any) -> Any:
    panel = page.locator("#chart-calibration")
    await panel.locator(".row").first.wait_for()
    await panel.scroll_into_view_if_needed()
    return await panel.bounding_box()


PAGES: Mapping[str, tuple[str | None, str, Callable[[Any], Awaitable[Any]]]] = {
    "1": ("refused", GATE, _refused),
    "2": ("burn", QUOTAS, _burn),
    "3": ("quota", QUOTAS, _more_quota),
    "3, with static quotas": (None, STATIC, _more_pacing),
    "4": ("change", QUOTAS, _change),
    "5": ("preempted", GATE, _preempted),
    "6": ("limit", QUOTAS, _limit),
    "7": ("hypothetical", GATE, _hypothetical),
    "8": ("guard", QUOTAS, _guarded_class),
    "9": ("forecasts", QUOTAS, _forecasts),
    # The other server is drained at the terminal.
    "10": ("drain", GATE, _drained),
}
"""Name of the image or None, server and steps by task; the steps return the part of the window to show."""


async def tried(chromium: Any, task: str, urls: Mapping[str, str], folder: Path) -> float:
    """Seconds from the address to the answer of a task on the page; its image, if any, goes into `folder`."""
    name, server, steps = PAGES[task]
    async with _unlocked(chromium, urls[server]) as page:
        began = time.monotonic()
        await page.goto("/dashboard/")
        await page.locator("#state[data-state=live]").wait_for()
        part = await steps(page)
        took = time.monotonic() - began
        if name is not None:
            image = await page.screenshot(**({} if part is None else {"clip": part}))
            _write(image, folder / f"operator-{name}.webp")
    return took


async def overview(chromium: Any, url: str, folder: Path) -> None:
    """The images of the whole dashboard, dark and light."""
    for scheme, name in (("dark", "dashboard"), ("light", "dashboard-light")):
        async with _unlocked(chromium, url, scheme) as page:
            await page.goto("/dashboard/")
            await page.locator("#chart-attainment canvas").wait_for()
            for table in ("decisions", "preemptions", "quotas"):
                await page.locator(f"#rows-{table} .event").first.wait_for()
            await page.locator("#rows-happenings .event", has_text="serves again").first.wait_for()
            _write(await page.screenshot(full_page=True), folder / f"{name}.webp")


async def terminal(chromium: Any, url: str, folder: Path) -> None:
    """The image of `tandem top`."""
    from controlplane.commands import top, top_app
    from controlplane.commands.live_view import LiveView

    # The imports held up the load, which runs in this event loop, too.
    await asyncio.sleep(_AFTER_IMPORTS_S)
    # One reading is enough.
    top_app._PERIOD_S = 3_600.0
    options, view = argparse.Namespace(server=url, key_file=None), LiveView()
    top.read(options, view)
    app = top_app.TopApp(view, lambda: top.read(options, view), str, "http://127.0.0.1:8000")
    async with app.run_test(size=(150, 46)) as pilot:
        await pilot.pause()
        drawing = app.export_screenshot(title="tandem top")
    page = await chromium.new_page(viewport={"width": 1860, "height": 1190})
    await page.set_content(f"<style>body {{ margin: 0 }}</style>{drawing}")
    _write(await page.locator("svg").first.screenshot(), folder / "top.webp")


def _write(png: bytes, path: Path) -> None:
    from PIL import Image

    Image.open(io.BytesIO(png)).convert("RGB").save(path, quality=_QUALITY, method=6)
