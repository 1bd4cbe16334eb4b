"""What happened under one load? The systems side by side, their requests, decisions and memory."""

from collections.abc import Mapping

from benchmark_control_plane.report import aggregates, formats, tables
from benchmark_control_plane.report.html import Markup, as_table, el, figure, join, key, section
from benchmark_control_plane.report.latency_chart import distribution_charts
from benchmark_control_plane.report.memory_chart import memory_chart, readable
from benchmark_control_plane.report.outcome_chart import (
    Bars,
    decision_bars,
    outcome_bars,
    part_class,
    share_chart,
)
from benchmark_control_plane.report.samples import Key, PooledSample
from benchmark_control_plane.report.schema import Memory, Results


def by_load(results: Results, samples: Mapping[Key, PooledSample]) -> Markup:
    loads = aggregates.common_loads(results)
    if not loads:
        return join()
    choices = (
        el("button", formats.load(load), type="button", data_load=number, aria_pressed="false")
        for number, load in enumerate(loads)
    )
    return section(
        "loads",
        "Side by side, at one load",
        "Everything in this part belongs to the load chosen here.",
        el("div", *choices, class_="picker", role="group", aria_label="Offered load"),
        *(_panel(results, samples, load, number) for number, load in enumerate(loads)),
    )


def _panel(results: Results, samples: Mapping[Key, PooledSample], load: float, number: int) -> Markup:
    became = "What became of the requests"
    decided = "What was decided"
    return el(
        "div",
        el("h3", f"At {formats.load(load)} load", class_="panel-title"),
        tables.systems_table(results, load),
        el(
            "div",
            _bars("outcomes", became, outcome_bars(results, samples, load), formats.OUTCOME_NAMES),
            _bars("decisions", decided, decision_bars(results, load), formats.DECISION_NAMES),
            class_="grid broad",
        ),
        *(_distributions(results, samples, load, name) for name in aggregates.classes(results)),
        _memory(results, load),
        class_="panel",
        data_panel=number,
    )


def _bars(name: str, title: str, bars: Bars, names: Mapping[str, str]) -> Markup | None:
    if not bars:
        return None
    legend = key({part_class(part): text for part, text in names.items()})
    chart = share_chart(name, f"{title}, by system", bars, names)
    return figure(title, legend, chart, listed=tables.shares_table(title, bars, names))


def _distributions(
    results: Results, samples: Mapping[Key, PooledSample], load: float, name: str
) -> Markup | None:
    heading = el("h4", el("b", name), ": how fast")
    if (listed := tables.percentile_table(results, load, name)) is None:
        return None
    if not (charts := distribution_charts(results, samples, load, name)):
        return join(heading, listed)
    drawn = el("div", *(figure(title, chart) for title, chart in charts), class_="grid")
    return join(heading, drawn, as_table(listed))


def _memory(results: Results, load: float) -> Markup | None:
    """One seed of each system: the first valid run that recorded its memory."""
    figures = []
    for system in results["systems"]:
        for run in aggregates.runs_of(results, system["name"], load):
            if run["memory"] and run["memory"]["times_s"] and run["memory"]["by_owner"]:
                figures.append(_memory_figure(run["memory"], f"{system['name']}, seed {run['seed']}"))
                break
    if not figures:
        return None
    return join(el("h4", "Who held the memory"), el("div", *figures, class_="grid broad"))


def _memory_figure(recorded: Memory, what: str) -> Markup:
    memory = readable(recorded)
    owners = {f"o{number}": owner for number, owner in enumerate(memory["by_owner"])}
    legend = key({**owners, "dashed": "where a quota ends"})
    return figure(what, legend, memory_chart(memory, what), listed=tables.memory_table(memory, what))
