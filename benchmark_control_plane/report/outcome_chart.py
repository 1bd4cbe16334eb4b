"""What became of the requests, and what was decided? Bars of shares that add up to all that were offered."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.html import Markup, el
from benchmark_control_plane.report.samples import Key, PooledSample
from benchmark_control_plane.report.schema import OUTCOMES, Results

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(label, amount by part) from above."""

_LEAST_FOR_TEXT = 0.12


def outcome_bars(results: Results, samples: Mapping[Key, PooledSample], load: float) -> Bars:
    """Over all classes and seeds."""
    bars = []
    for system in results["systems"]:
        total: Counter[str] = Counter()
        for (name, at, _), sample in samples.items():
            if (name, at) == (system["name"], load):
                total += sample.outcomes
        if total:
            bars.append((system["name"], {outcome: float(total[outcome]) for outcome in OUTCOMES}))
    return bars


def decision_bars(results: Results, load: float) -> Bars:
    """Only systems that decide have any."""
    bars = []
    for system in results["systems"]:
        total: Counter[str] = Counter()
        for run in aggregates.runs_of(results, system["name"], load):
            if decisions := run["decisions"]:
                total += Counter({name: decisions[name] for name in formats.DECISION_NAMES})
        if total:
            bars.append((system["name"], {name: float(total[name]) for name in formats.DECISION_NAMES}))
    return bars


def share_chart(name: str, title: str, bars: Bars, names: Mapping[str, str]) -> Markup:
    rows = []
    for label, parts in bars:
        total = sum(parts.values())
        segments = (
            _segment(part, amount / total, f"{label}: {names[part]}")
            for part, amount in parts.items()
            if amount
        )
        rows.append(el("div", el("span", label), el("div", *segments, class_="track"), class_="bar"))
    return el("div", *rows, class_="bars", data_chart=name, role="img", aria_label=title)


def part_class(part: str) -> str:
    """What page.css colours."""
    return f"part-{part.lower().replace('_', '-')}"


def _segment(part: str, share: float, said: str) -> Markup:
    percent = formats.share(share)
    return el(
        "i",
        percent if share >= _LEAST_FOR_TEXT else None,
        class_=part_class(part),
        style=f"width:{100 * share:.2f}%",
        data_tip=f"{said} {percent}",
    )
