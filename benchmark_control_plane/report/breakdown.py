"""What became of the requests, and what was decided? Bars of shares that add up to all that were offered."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmark_control_plane.report import facts, svg, wording
from benchmark_control_plane.report.markup import Markup, el, join
from benchmark_control_plane.report.samples import Key, Sample
from benchmark_control_plane.report.schema import OUTCOMES, Results

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(label, amount by part) from above."""

_ROW, _WIDTH = 46, 520
_LEAST_FOR_TEXT = 44


def outcome_bars(results: Results, samples: Mapping[Key, Sample], load: float) -> Bars:
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
        for run in facts.runs_of(results, system["name"], load):
            if run["decisions"]:
                total += Counter({name: run["decisions"][name] for name in wording.DECISION_NAMES})  # type: ignore[literal-required]
        if total:
            bars.append((system["name"], {name: float(total[name]) for name in wording.DECISION_NAMES}))
    return bars


def share_chart(name: str, title: str, bars: Bars, names: Mapping[str, str]) -> Markup:
    height = _ROW * len(bars) + 8
    frame = svg.Frame(_WIDTH, height, svg.Scale(0, 1, 2, _WIDTH - 2), svg.Scale(0, 1, height, 0))
    rows = []
    for row, (label, parts) in enumerate(bars):
        total = sum(parts.values())
        rows.append(el("text", label, class_="bar-label", x=2, y=row * _ROW + 14))
        done = 0.0
        for part, amount in parts.items():
            if amount:
                rows.append(
                    _segment(frame, row, done / total, amount / total, part, f"{label}: {names[part]}")
                )
            done += amount
    return svg.figure(name, frame, title, join(*rows), class_="medium")


def part_class(part: str) -> str:
    """What page.css colours."""
    return f"part-{part.lower().replace('_', '-')}"


def _segment(frame: svg.Frame, row: int, start: float, share: float, part: str, said: str) -> Markup:
    left, right = frame.x(start), frame.x(start + share)
    top = row * _ROW + 20
    shape = el(
        "rect",
        class_="segment",
        x=left,
        y=top,
        width=max(right - left - 1, 0.8),
        height=20,
        rx=2,
        data_tip=f"{said} {wording.share(share)}",
    )
    is_wide = right - left >= _LEAST_FOR_TEXT
    text = (
        el(
            "text",
            wording.share(share),
            class_="inside",
            x=(left + right) / 2,
            y=top + 14,
            text_anchor="middle",
        )
        if is_wide
        else None
    )
    return el("g", shape, text, class_=part_class(part))
