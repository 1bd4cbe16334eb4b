"""How is a benchmark shown to a person? One HTML page that needs nothing but itself.

Charts are drawn here, as SVG; the script only chooses a load, dims systems and shows what is under the
pointer. Without it the page shows everything at once. Colours are in chart.css, sizes in page.css.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from benchmark_control_plane.report import (
    aggregates,
    headline,
    load_section,
    overview_section,
    setup_section,
)
from benchmark_control_plane.report.attainment_chart import attainment_chart
from benchmark_control_plane.report.html import Markup, el, join
from benchmark_control_plane.report.samples import pooled
from benchmark_control_plane.report.schema import results_of

_ICON = "data:,"


def render(results: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]) -> str:
    """Raises BadInput where results or requests are not of the format that schema.py describes."""
    known = aggregates.ordered(results_of(results))
    samples = pooled(known, requests)
    head = el(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        Markup(f'<link rel="icon" href="{_ICON}">'),
        el("title", f"{known['experiment']['name']}: {headline.headline(known)}"),
        el("style", Markup(_text("chart.css") + _text("page.css"))),
    )
    body = el(
        "body",
        el(
            "main",
            overview_section.opening(known),
            overview_section.legend(known),
            overview_section.attainment(known),
            load_section.by_load(known, samples),
            setup_section.set_up(known),
            setup_section.words(),
        ),
        el("div", id="tip", role="status", hidden=True),
        el("script", Markup(_text("page.js"))),
    )
    return "<!doctype html>\n" + el("html", join(head, body), lang="en") + "\n"


def picture(results: Mapping[str, Any]) -> str:
    """Attainment against load as an SVG file of its own, light or dark as its reader prefers."""
    known = aggregates.ordered(results_of(results))
    style = Markup(f"<style>{_text('chart.css')} svg {{ font-family: system-ui, sans-serif; }}</style>")
    return (
        attainment_chart(known, aggregates.OVERALL, width=1040, height=400, has_labels=True, style=style)
        + "\n"
    )


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
