"""The page in Chromium: light and dark, at desktop and phone size.

Skipped where there is no Chromium (`tests/chromium.py`).
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmark_control_plane.report.page import render
from tests import experiments
from tests.chromium import launch_options

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.browser

DESK, PHONE = (1280, 900), (390, 844)

# Every visible chart: its box, and whether it contains a shape with an extent.
_CHARTS = """() => [...document.querySelectorAll('[data-chart]')]
  .filter((chart) => chart.checkVisibility()).map((chart) => {
    const box = chart.getBoundingClientRect();
    const shapes = [...chart.querySelectorAll('path, rect, circle, i')];
    return {name: chart.dataset.chart, width: box.width, height: box.height, right: box.right,
            drawn: shapes.map((s) => s.getBoundingClientRect()).some((b) => b.width + b.height > 3)};
  })"""
# WCAG 2.2, 1.4.3: the ratio of the relative luminances of a text and the first opaque colour behind it.
_CONTRASTS = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const rgb = channels(getComputedStyle(at).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const selector = 'h1, h2, h4, p, dt, dd, small, th, td, caption, li, summary, text, button, .bar *';
  const texts = [...document.querySelectorAll(selector)]
    .filter((element) => element.checkVisibility() && element.textContent.trim());
  return texts.map((element) => {
    const style = getComputedStyle(element);
    const ink = luminance(channels(element instanceof SVGElement ? style.fill : style.color));
    const paper = luminance(behind(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    return {ratio, text: element.textContent.trim().slice(0, 40), name: element.tagName};
  });
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = launch_options()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    content = experiments.results(partial=True)
    file: Path = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(content, experiments.requests(content)), encoding="utf-8")
    return file.as_uri()


def opened(
    chromium: Any,
    address: str,
    size: tuple[int, int] = DESK,
    *,
    scheme: str = "light",
    has_script: bool = True,
) -> tuple[Any, list[str]]:
    """The page, and its console messages, errors and requests for other addresses."""
    width, height = size
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=has_script
    )
    page, noise = context.new_page(), []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: request.url == address or noise.append(request.url))
    page.goto(address)
    return page, noise


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_chart_is_drawn_within_the_viewport(
    chromium: Any, address: str, size: tuple[int, int], scheme: str
) -> None:
    page, noise = opened(chromium, address, size, scheme=scheme)
    charts = page.evaluate(_CHARTS)
    assert sorted({chart["name"] for chart in charts}) == [
        "attainment-batch",
        "attainment-embedding",
        "attainment-interactive",
        "attainment-overall",
        "decisions",
        "distribution",
        "frontier",
        "memory",
        "outcomes",
    ]
    assert [chart["name"] for chart in charts].count("attainment-overall") == 1
    assert [
        chart for chart in charts if not chart["drawn"] or min(chart["width"], chart["height"]) < 40
    ] == []
    assert [chart for chart in charts if chart["right"] > size[0]] == []
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert noise == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_sufficient_contrast(chromium: Any, address: str, scheme: str) -> None:
    page, _ = opened(chromium, address, scheme=scheme)
    contrasts = page.evaluate(_CONTRASTS)
    assert len(contrasts) > 200
    assert [seen for seen in contrasts if seen["ratio"] < 4.5] == []


def test_light_and_dark_schemes_differ(chromium: Any, address: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(chromium, address, scheme=s)[0].evaluate(paper) for s in ("light", "dark"))
    assert (light, dark) == ("rgb(251, 251, 249)", "rgb(15, 20, 26)")


def test_a_button_selects_its_load(chromium: Any, address: str) -> None:
    page, noise = opened(chromium, address)
    assert page.locator("[data-panel]:visible").count() == 1
    page.get_by_role("button", name="50 %", exact=True).click()
    assert page.locator("[data-panel]:visible").get_attribute("data-panel") == "0"
    assert page.get_by_text("Medians over the seeds at 50 % load, with their ranges").is_visible()
    assert noise == []


def test_a_selected_system_dims_the_others(chromium: Any, address: str) -> None:
    page, _ = opened(chromium, address)
    button = page.get_by_role("button", name="static-split", exact=True)
    button.click()
    assert page.locator("svg .n0:not(.dim)").count() == 0
    assert page.locator("svg .n1.dim").count() == 0 < page.locator("svg .n1").count()
    button.press("Enter")
    assert page.locator("svg .dim").count() == 0


def test_the_tooltip_stays_within_the_viewport(chromium: Any, address: str) -> None:
    page, _ = opened(chromium, address, PHONE)
    mark = page.locator("svg:visible .n0 .mark").last
    mark.scroll_into_view_if_needed()
    # Scroll handlers have run after two animation frames.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    mark.hover(force=True)
    tip = page.locator("#tip")
    assert tip.is_visible() and "tandem" in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0]


def test_without_its_script_the_page_shows_every_load(chromium: Any, address: str) -> None:
    page, _ = opened(chromium, address, has_script=False)
    assert page.locator("[data-panel]:visible").count() == 4
    assert page.locator(".picker").is_visible() is False
    assert page.get_by_text("At 150 % load", exact=True).is_visible()


def test_a_screen_reader_gets_names_and_tables(chromium: Any, address: str) -> None:
    page, _ = opened(chromium, address)
    assert page.locator("[data-chart]:not([aria-label])").count() == 0
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.get_by_role("alert").count() == 2
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
