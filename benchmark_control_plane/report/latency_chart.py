"""Draws cumulative latency distributions as shares of all offered requests, so that losses lower a curve."""

from collections.abc import Mapping

from markupsafe import Markup

from benchmark_control_plane.report import formats, svg_axes
from benchmark_control_plane.report.elements import el
from benchmark_control_plane.report.samples import LATENCIES, Key, PooledSample
from benchmark_control_plane.report.schema import Results
from benchmark_control_plane.report.series_style import sign

_WIDTH, _HEIGHT = 340, 226


def distribution_charts(
    results: Results, samples: Mapping[Key, PooledSample], load: float, service_class: str
) -> list[tuple[str, Markup]]:
    """(title, chart) for each latency that the class has."""
    charts = []
    for metric in LATENCIES:
        curves = {
            number: curve
            for number, system in enumerate(results["systems"])
            if (sample := samples.get((system["name"], load, service_class)))
            and (curve := sample.curve(metric))
        }
        if curves:
            bound = results["slos"].get(service_class, {}).get(metric)
            chart = _chart(
                results, curves, bound, f"{service_class}, {formats.METRIC_NAMES[metric].lower()}", load
            )
            charts.append((formats.METRIC_NAMES[metric], chart))
    return charts


def _chart(
    results: Results,
    curves: Mapping[int, list[tuple[float, float]]],
    bound: float | None,
    what: str,
    load: float,
) -> Markup:
    ends = [value for curve in curves.values() for value in (curve[0][0], curve[-1][0])]
    low = max(min([*ends, bound or ends[0]]), 0.01)
    high = max([*ends, bound or ends[0], low * 2])
    frame = svg_axes.ChartFrame(
        _WIDTH,
        _HEIGHT,
        svg_axes.Scale(low * 0.9, high * 1.1, 58, _WIDTH - 14, is_log=True),
        svg_axes.Scale(0.0, 1.0, _HEIGHT - 46, 22),
    )
    grid = svg_axes.axes(
        frame,
        x_ticks=frame.x.ticks(6),
        y_ticks=(0, 0.5, 0.9, 1),
        x_text=_short,
        y_text=lambda share: f"{100 * share:.0f} %",
        x_title="time (log scale)",
        y_title="share of offered requests",
    )
    lines = []
    for number, curve in reversed(list(curves.items())):
        corners = [(frame.x(value), frame.y(share)) for value, share in curve]
        tip = f"{results['systems'][number]['name']}: {formats.share(curve[-1][1])} of offered requests ended"
        start = (corners[0][0], frame.y(0))
        path = svg_axes.line([start, *corners, (frame.right, corners[-1][1])], class_="line", data_tip=tip)
        lines.append(el("g", path, class_=sign(number)))
    return svg_axes.figure(
        "distribution",
        frame,
        f"{what} at {formats.load(load)} load: cumulative share of offered requests, by system",
        grid,
        _objective(frame, bound),
        *lines,
    )


def _objective(frame: svg_axes.ChartFrame, bound: float | None) -> Markup | None:
    if bound is None:
        return None
    x = frame.x(bound)
    is_right = x > (frame.left + frame.right) / 2
    at, anchor = (x - 5, "end") if is_right else (x + 5, "start")
    return el(
        "g",
        el("line", class_="target", x1=x, x2=x, y1=frame.top - 18, y2=frame.bottom),
        el("text", f"objective {_short(bound)}", class_="note", x=at, y=frame.top - 10, text_anchor=anchor),
    )


def _short(value_ms: float) -> str:
    return f"{value_ms / 1000:.3g} s" if value_ms >= 1000 else f"{value_ms:.3g} ms"
