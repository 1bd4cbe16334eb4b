"""How is a benchmark shown to a person? One HTML page that needs nothing but itself.

Charts are drawn here, as SVG; the script only chooses a load, dims systems and shows what is under the
pointer. Without it the page shows everything at once. Colours are in chart.css, sizes in page.css.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from benchmark_control_plane.report import facts, finding, headline, load_panel, setting
from benchmark_control_plane.report.curves import attainment_chart
from benchmark_control_plane.report.markup import Markup, el, join
from benchmark_control_plane.report.samples import pooled
from benchmark_control_plane.report.schema import results_of

_ICON = "data:,"


def render(results: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]) -> str:
    """Raises BadInput where results or requests are not of the format that schema.py describes."""
    known = facts.ordered(results_of(results))
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
            finding.opening(known),
            finding.legend(known),
            finding.attainment(known),
            load_panel.by_load(known, samples),
            setting.set_up(known),
            setting.words(),
        ),
        el("div", id="tip", role="status", hidden=True),
        el("script", Markup(_text("page.js"))),
    )
    return "<!doctype html>\n" + el("html", join(head, body), lang="en") + "\n"


def picture(results: Mapping[str, Any]) -> str:
    """Attainment against load as an SVG file of its own, light or dark as its reader prefers."""
    known = facts.ordered(results_of(results))
    style = Markup(f"<style>{_text('chart.css')} svg {{ font-family: system-ui, sans-serif; }}</style>")
    return attainment_chart(known, facts.OVERALL, width=1040, height=400, has_labels=True, style=style) + "\n"


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
