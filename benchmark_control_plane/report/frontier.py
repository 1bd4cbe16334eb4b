"""Which rate does each system carry before it breaks its promise? A bar each, with its range over seeds."""

from benchmark_control_plane.report import facts, wording
from benchmark_control_plane.report.markup import Markup, el
from benchmark_control_plane.report.schema import Results
from benchmark_control_plane.report.signs import sign


def frontier_chart(results: Results, target: float) -> Markup:
    rows = [row for row in results["max_goodput_rate"] if row["target"] == target]
    longest = max([rate for row in rows for rate in (row["rps"], *row["per_seed"]) if rate], default=1.0)
    bars = [
        _bar(number, system["name"], row["rps"], facts.spread(row["per_seed"]), longest)
        for number, system in enumerate(results["systems"])
        if (row := facts.frontier(results, system["name"], target))
    ]
    title = f"Highest rate at {wording.share(target)} attainment, by system"
    return el("div", *bars, class_="bars", data_chart="frontier", role="img", aria_label=title)


def _bar(number: int, system: str, rate: float | None, seeds: facts.Spread | None, longest: float) -> Markup:
    width = 100 * (rate or 0.0) / longest
    whisker = None
    said = f"{system}: {wording.rate(rate) if rate else 'at no rate that was offered'}"
    if seeds is not None:
        start, length = 100 * seeds.low / longest, 100 * (seeds.high - seeds.low) / longest
        whisker = el("u", style=f"left:{start:.2f}%;width:{length:.2f}%")
        said += f"; {wording.spread(seeds.low, seeds.high)} over {seeds.count} seeds"
    filled = el("i", style=f"width:{width:.2f}%")
    label = el("span", system, el("b", wording.rate(rate)))
    return el(
        "div", label, el("div", filled, whisker, class_="track"), class_=f"bar {sign(number)}", data_tip=said
    )
