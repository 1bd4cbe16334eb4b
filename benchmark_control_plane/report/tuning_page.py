"""Renders what `tandem tune` found as one self-contained HTML page, in the style of the report."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from benchmark_control_plane.report import formats, svg_axes
from benchmark_control_plane.report.elements import el, join, packaged_text, render_template
from benchmark_control_plane.report.formats import yaml_value
from benchmark_control_plane.report.tables import table

_LEFT, _WIDTH, _ROW, _TOP, _BOTTOM = 250, 1040, 44, 10, 44
_LOAD_LEFT, _LOAD_HEIGHT = 74, 320


def tuning_page(facts: Mapping[str, Any]) -> str:
    """The page; `facts` are those that `tandem tune --json` prints."""
    style = "".join(packaged_text(name) for name in ("chart.css", "page.css"))
    return render_template(
        "tuning",
        facts=facts,
        style=Markup(style),
        script=Markup(packaged_text("page.js")),
        formats=formats,
        table=table,
        class_chart=class_chart,
        load_chart=load_chart,
        key_chart=key_chart,
        class_rows=_class_rows(facts),
        load_rows=_load_rows(facts),
        key_rows=_key_rows(facts),
        trial_rows=_trial_rows(facts),
    )


def class_chart(classes: list[Mapping[str, Any]]) -> Markup:
    """Attainment by class, before (hollow) and after (filled), as shares of its requests."""
    low = min(min(each["before"], each["after"]) for each in classes)
    frame = _frame(len(classes), max(0.0, 0.1 * int(10 * low - 0.5)), 1.0)
    rows = [
        join(
            _row_name(frame, number, each["name"]),
            _bar(frame, number, each["before"], each["after"]),
            el("circle", class_="refused", cx=frame.x(each["before"]), cy=_y(number), r=5.0, data_tip=(
                f"{each['name']} before: {formats.share(each['before'])}"
            )),
            el("circle", class_="mark", cx=frame.x(each["after"]), cy=_y(number), r=5.5, data_tip=(
                f"{each['name']} after: {formats.share(each['after'])} of {each['requests']:,} requests"
            )),
        )
        for number, each in enumerate(classes)
    ]  # fmt: skip
    grid = _grid(frame, formats.share, "attainment; hollow before, filled after")
    return _figure("classes", frame, "Attainment by class, before and after", grid, *rows)


def load_chart(loads: list[Mapping[str, Any]]) -> Markup:
    """Attainment over load, before (dashed, hollow) and after (filled)."""
    values = [each[when] for each in loads for when in ("before", "after")]
    height, edge = _LOAD_HEIGHT, 0.04 * (loads[-1]["load"] - loads[0]["load"])
    frame = svg_axes.ChartFrame(
        _WIDTH,
        height,
        svg_axes.Scale(loads[0]["load"] - edge, loads[-1]["load"] + edge, _LOAD_LEFT, _WIDTH - 80),
        svg_axes.Scale(max(0.0, 10 * int(min(values) / 10 - 0.5)), 100.0, height - _BOTTOM, _TOP),
    )
    grid = svg_axes.axes(
        frame, x_ticks=[each["load"] for each in loads], y_ticks=frame.y.ticks(6), x_text=formats.load,
        y_text=lambda value: f"{value:g} %", x_title="load, as a part of the log's",
        y_title="attainment",
    )  # fmt: skip
    ends = [frame.y(loads[-1][when]) for when in ("before", "after")]
    heights = svg_axes.spread_labels(ends, 16, frame.top, frame.bottom)
    before, after = (
        _load_line(frame, loads, when, style, at)
        for when, style, at in zip(("before", "after"), ("s5", "s0"), heights, strict=True)
    )
    return svg_axes.figure("loads", frame, "Attainment over load, before and after", grid, before, after)


def _load_line(
    frame: svg_axes.ChartFrame, loads: list[Mapping[str, Any]], when: str, style: str, label_y: float
) -> Markup:
    points = [(frame.x(each["load"]), frame.y(each[when])) for each in loads]
    marks = [
        el("circle", class_="refused" if when == "before" else "mark", cx=x, cy=y, r=5.0, data_tip=(
            f"{when}, at {formats.load(each['load'])} of the log's load: {each[when]:.1f} % "
            f"(95 % of the difference: {each['error']:.1f})"
        ))
        for each, (x, y) in zip(loads, points, strict=True)
    ]  # fmt: skip
    label = el("text", when, class_=f"label {style}", x=frame.right + 12, y=label_y + 4)
    return el("g", svg_axes.line(points, class_="line"), *marks, label, class_=style)


def key_chart(changes: list[Mapping[str, Any]]) -> Markup:
    """Points that each changed key brings, with the 95 % interval."""
    known = [each for each in changes if each["gain"] is not None]
    lowest = min((each["gain"] - each["error"] for each in known), default=0.0)
    highest = max((each["gain"] + each["error"] for each in known), default=1.0)
    frame = _frame(len(known), min(0.0, lowest), max(1.0, highest))
    rows = [
        join(
            _row_name(frame, number, each["key"]),
            _bar(frame, number, each["gain"] - each["error"], each["gain"] + each["error"]),
            el("circle", class_="mark", cx=frame.x(each["gain"]), cy=_y(number), r=5.5, data_tip=(
                f"{each['key']}: {each['gain']:+.1f} points, 95 % interval of {each['error']:.1f}"
            )),
        )
        for number, each in enumerate(known)
    ]  # fmt: skip
    grid = _grid(frame, lambda value: f"{value:g}", "points lost if this key alone is as it was")
    zero = el("line", class_="target", x1=frame.x(0), x2=frame.x(0), y1=frame.top, y2=frame.bottom)
    return _figure("keys", frame, "Points that each changed key brings", grid, zero, *rows)


def _frame(rows: int, low: float, high: float) -> svg_axes.ChartFrame:
    height = _TOP + _ROW * rows + _BOTTOM
    return svg_axes.ChartFrame(
        _WIDTH,
        height,
        svg_axes.Scale(low, high, _LEFT, _WIDTH - 24),
        svg_axes.Scale(0, rows, height - _BOTTOM, _TOP),
    )


def _grid(frame: svg_axes.ChartFrame, text: Any, title: str) -> Markup:
    return svg_axes.axes(frame, x_ticks=frame.x.ticks(8), y_ticks=(), x_text=text, y_text=str, x_title=title)


def _figure(name: str, frame: svg_axes.ChartFrame, title: str, *children: Markup) -> Markup:
    return svg_axes.figure(name, frame, title, el("g", *children, class_="s0"))


def _y(number: int) -> float:
    return _TOP + _ROW * (number + 0.5)


def _row_name(frame: svg_axes.ChartFrame, number: int, name: str) -> Markup:
    return el("text", name, class_="tick", x=frame.left - 10, y=_y(number) + 4, text_anchor="end")


def _bar(frame: svg_axes.ChartFrame, number: int, start: float, end: float) -> Markup:
    return el("line", class_="line", x1=frame.x(start), x2=frame.x(end), y1=_y(number), y2=_y(number))


def _class_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    shares = ("before", "after", "rejected_before", "rejected_after")
    return [
        (each["name"], formats.count(each["requests"]), *(formats.share(each[name]) for name in shares))
        for each in (facts["held_out"] or {"classes": []})["classes"]
    ]


def _load_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            formats.load(each["load"]),
            f"{each['before']:.1f} %",
            f"{each['after']:.1f} %",
            f"±{each['error']:.1f}",
        )
        for each in facts["loads"]
    ]


def _key_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            each["key"] if each["basis"] is None else f"{each['key']} ({each['basis']})",
            yaml_value(each["before"]),
            yaml_value(each["after"]),
            formats.ABSENT if each["gain"] is None else f"{each['gain']:+.1f}",
            formats.ABSENT if each["error"] is None else f"±{each['error']:.1f}",
        )
        for each in facts["changes"]
    ]


def _trial_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"{number}",
            ", ".join(f"{key}: {yaml_value(value)}" for key, value in each["changes"].items()) or "as it is",
            f"{each['blocks']}",
            f"{each['gain']:+.1f}",
        )
        for number, each in enumerate(facts["trials"], 1)
    ]
