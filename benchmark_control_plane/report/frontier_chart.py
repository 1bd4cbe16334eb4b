"""Draws the highest rate of each system at a target attainment as bars with the range over the seeds."""

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.elements import el
from benchmark_control_plane.report.schema import FrontierRow, Results
from benchmark_control_plane.report.series_style import sign


def frontier_chart(results: Results, target: float) -> Markup:
    """HTML bars of all systems at one target."""
    rows = [row for row in results["max_goodput_rate"] if row["target"] == target]
    longest = max([rate for row in rows for rate in (row["rps"], *row["per_seed"]) if rate], default=1.0)
    bars = [
        _bar(results, number, row, longest)
        for number, system in enumerate(results["systems"])
        if (row := aggregates.frontier(results, system["name"], target))
    ]
    title = f"Highest rate at {formats.share(target)} attainment, by system"
    return el("div", *bars, class_="bars", data_chart="frontier", role="img", aria_label=title)


def _bar(results: Results, number: int, row: FrontierRow, longest: float) -> Markup:
    seeds = aggregates.rates(row)
    text = formats.reached(row["rps"], is_limit=aggregates.is_limit(results, row))
    tip = f"{row['system']}: {text if row['rps'] else 'at no offered rate'}"
    whisker = None
    if seeds is not None:
        start, length = 100 * seeds.low / longest, 100 * (seeds.high - seeds.low) / longest
        whisker = el("u", style=f"left:{start:.2f}%;width:{length:.2f}%")
        ends = formats.reached_range(seeds.low, seeds.high, is_limit=aggregates.has_limit(results, row))
        tip += f"; {ends} over {formats.several(seeds.count, 'seed')}"
    track = el(
        "div", el("i", style=f"width:{100 * (row['rps'] or 0.0) / longest:.2f}%"), whisker, class_="track"
    )
    label = el("span", row["system"], el("b", text))
    return el("div", label, track, class_=f"bar {sign(number)}", data_tip=tip)
