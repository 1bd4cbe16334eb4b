"""Draws outcomes and decisions of the requests as bars of shares of all offered requests."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.elements import render_template
from benchmark_control_plane.report.samples import Key, PooledSample
from benchmark_control_plane.report.schema import OUTCOMES, Results

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(label, amount by part), from top to bottom."""


def outcome_bars(results: Results, samples: Mapping[Key, PooledSample], load: float) -> Bars:
    """Requests by outcome, over all classes and seeds."""
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
    """Requests by decision; only of systems that report decisions."""
    bars = []
    for system in results["systems"]:
        total: Counter[str] = Counter()
        for run in aggregates.runs_of(results, system["name"], load):
            if decisions := run["decisions"]:
                total += Counter({name: decisions[name] for name in formats.DECISION_NAMES})
        if total:
            bars.append((system["name"], {name: float(total[name]) for name in formats.DECISION_NAMES}))
    return bars


def share_bars(
    results: Results, samples: Mapping[Key, PooledSample], load: float
) -> Iterator[tuple[str, str, Bars, Mapping[str, str]]]:
    """(name, title, bars, name by part) of each chart of shares."""
    outcomes, decisions = outcome_bars(results, samples, load), decision_bars(results, load)
    yield "outcomes", "Outcomes of the requests", outcomes, formats.OUTCOME_NAMES
    yield "decisions", "Decisions of the gate", decisions, formats.DECISION_NAMES


def share_key(names: Mapping[str, str]) -> dict[str, str]:
    """Legend: text by CSS class."""
    return {part_class(part): text for part, text in names.items()}


def share_chart(name: str, title: str, bars: Bars, names: Mapping[str, str]) -> Markup:
    return render_template(
        "shares", name=name, title=title, bars=bars, names=names, part_class=part_class, formats=formats
    )


def part_class(part: str) -> str:
    """CSS class that colours the part (chart.css)."""
    return f"part-{part.lower().replace('_', '-')}"
