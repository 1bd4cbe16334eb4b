"""Draws attainment against offered load as SVG: a line per system, a band for the range over the seeds."""

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats, svg_axes
from benchmark_control_plane.report.elements import el, join
from benchmark_control_plane.report.schema import Results
from benchmark_control_plane.report.series_style import cross, marker, sign

_TOP, _BOTTOM, _LEFT = 12, 46, 64
_LETTER = 8.2
_LABEL_GAP = 16


def attainment_chart(
    results: Results,
    name: str,
    width: int,
    height: int,
    *,
    labels: bool = False,
    style: Markup | None = None,
) -> Markup:
    """SVG chart of the class `name`, or of `overall`.

    With `labels`, each line is named at its right end. `style` is inlined for a chart outside the page.
    """
    loads = aggregates.loads(results)
    longest = max((len(system["name"]) for system in results["systems"]), default=0)
    right = width - (min(20 + _LETTER * longest, 0.4 * width) if labels else 14)
    edge = 0.04 * (loads[-1] - loads[0])
    frame = svg_axes.ChartFrame(
        width,
        height,
        svg_axes.Scale(loads[0] - edge, loads[-1] + edge, _LEFT, right),
        svg_axes.Scale(0.0, 1.0, height - _BOTTOM, _TOP),
    )
    grid = svg_axes.axes(
        frame,
        x_ticks=loads,
        y_ticks=(0, 0.25, 0.5, 0.75, 1),
        x_text=formats.load,
        y_text=lambda share: f"{100 * share:.0f} %",
        x_title=_load_title(results),
        y_title="share of requests that met their SLO",
    )
    lines = [
        _system_line(results, name, number, frame)
        for number, _ in reversed(list(enumerate(results["systems"])))
    ]
    return svg_axes.figure(
        f"attainment-{name}",
        frame,
        f"Attainment of {name} against offered load, by system",
        style,
        el("rect", class_="paper", width=width, height=height) if style else None,
        grid,
        _targets(results, frame),
        *lines,
        _labels(results, name, frame) if labels else None,
        class_="wide" if labels else "",
    )


def _load_title(results: Results) -> str:
    capacity = results.get("capacity_rps")
    return f"offered load; 100 % is {formats.rate(capacity)}" if capacity else "offered load"


def _system_line(results: Results, name: str, number: int, frame: svg_axes.ChartFrame) -> Markup:
    system = results["systems"][number]["name"]
    upper, lower, middle, marks, dots = [], [], [], [], []
    at_load = {load: aggregates.runs_of(results, system, load) for load in aggregates.loads(results)}
    max_seeds = max(map(len, at_load.values()))
    for load, runs in at_load.items():
        over = aggregates.attained(runs, name)
        if over is None:
            continue
        x = frame.x(load)
        each = (run["attainment"].get(name) for run in runs)
        dots += [el("circle", class_="seed", cx=x, cy=frame.y(v), r=1.6) for v in each if v is not None]
        # A rate search may run few seeds at a load; their median is not comparable with that of all seeds.
        if 2 * len(runs) < max_seeds:
            continue
        middle.append((x, frame.y(over.median)))
        upper.append((x, frame.y(over.high)))
        lower.append((x, frame.y(over.low)))
        ends = f"{formats.share(over.low)} to {formats.share(over.high)}"
        seeds = formats.several(over.count, "seed")
        tip = f"{system}, {name} at {formats.load(load)} load: {formats.share(over.median)} ({ends}, {seeds})"
        marks.append(marker(number, x, frame.y(over.median), class_="mark", data_tip=tip))
    invalid = [
        el("path", class_="refused", d=cross(x, y), data_tip=f"not valid: {why}")
        for x, y, why in _invalid_points(results, system, name, frame)
    ]
    if not middle:
        return el("g", *invalid, class_=sign(number))
    band = svg_axes.area(upper, lower, class_="band")
    return el("g", band, *dots, svg_axes.line(middle, class_="line"), *marks, *invalid, class_=sign(number))


def _invalid_points(
    results: Results, system: str, name: str, frame: svg_axes.ChartFrame
) -> list[tuple[float, float, str]]:
    return [
        (frame.x(run["load"]), frame.y(value), run["why_invalid"] or "no reason given")
        for run in aggregates.invalid(results)
        if run["system"] == system and (value := run["attainment"].get(name)) is not None
    ]


def _targets(results: Results, frame: svg_axes.ChartFrame) -> Markup:
    return join(
        *(
            el("line", class_="target", x1=frame.left, x2=frame.right, y1=frame.y(goal), y2=frame.y(goal))
            for goal in aggregates.targets(results)
        )
    )


def _labels(results: Results, name: str, frame: svg_axes.ChartFrame) -> Markup:
    ends: list[tuple[int, str, float]] = []
    for number, system in enumerate(results["systems"]):
        for load in reversed(aggregates.loads(results)):
            runs = aggregates.runs_of(results, system["name"], load)
            if over := aggregates.attained(runs, name):
                ends.append((number, system["name"], frame.y(over.median)))
                break
    heights = svg_axes.spread_labels([y for _, _, y in ends], _LABEL_GAP, frame.top, frame.bottom)
    return join(
        *(
            el("text", system, class_=f"label {sign(number)}", x=frame.right + 10, y=y + 4)
            for (number, system, _), y in zip(ends, heights, strict=True)
        )
    )
