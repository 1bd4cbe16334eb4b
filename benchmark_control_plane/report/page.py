"""Renders results as one self-contained HTML page.

Charts are drawn as SVG; the script only selects a load, dims systems and shows tooltips. Without it the
page shows all loads. Colours are in chart.css, the layout in page.css, the structure in templates/.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats, headline, tables
from benchmark_control_plane.report.attainment_chart import attainment_chart
from benchmark_control_plane.report.elements import packaged_text, render_template
from benchmark_control_plane.report.frontier_chart import frontier_chart
from benchmark_control_plane.report.latency_chart import distribution_charts
from benchmark_control_plane.report.memory_chart import memory_chart, owner_key, recorded_memory
from benchmark_control_plane.report.outcome_chart import share_bars, share_chart, share_key
from benchmark_control_plane.report.samples import pool_samples
from benchmark_control_plane.report.schema import results_of
from benchmark_control_plane.report.series_style import marker, sign

_CALLED_BY_TEMPLATES = (
    attainment_chart, distribution_charts, frontier_chart, marker, memory_chart, owner_key,
    recorded_memory, share_bars, share_chart, share_key, sign,
)  # fmt: skip


def render(results: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]) -> str:
    """The page. Raises BadInput if results or requests do not match schema.py."""
    known = aggregates.ordered(results_of(results))
    samples = pool_samples(known, requests)
    return render_template(
        "page",
        results=known,
        samples=samples,
        style=Markup(packaged_text("chart.css") + packaged_text("page.css")),
        script=Markup(packaged_text("page.js")),
        aggregates=aggregates,
        formats=formats,
        headline=headline,
        tables=tables,
        **{function.__name__: function for function in _CALLED_BY_TEMPLATES},
    )


def picture(results: Mapping[str, Any]) -> str:
    """Attainment against load as a complete SVG file, light or dark by the reader's preference."""
    known = aggregates.ordered(results_of(results))
    style = Markup(
        f"<style>{packaged_text('chart.css')} svg {{ font-family: system-ui, sans-serif; }}</style>"
    )
    return attainment_chart(known, aggregates.OVERALL, 1040, 400, labels=True, style=style) + "\n"
