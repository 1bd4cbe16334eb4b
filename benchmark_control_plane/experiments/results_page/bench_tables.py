"""Markdown of the results of `tandem bench run`: one experiment in full, or its rates in one cell."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.schema import Results, SystemInfo


def full(results: Results, picture: str | None, link: str) -> str:
    """Headline, chart, and the systems side by side: rates, losses, attainment under each load."""
    ordered = aggregates.ordered(results)
    # Ablations may have been run under one load only.
    names = [system["name"] for system in ordered["systems"]][:1]
    own = [run for run in ordered["runs"] if run["system"] in names]
    loads = aggregates.common_loads({**ordered, "runs": own}) if own else []
    lines = [*_rates_table(ordered, loads[-1]), *_loads_table(ordered, loads)] if loads else []
    seeds = formats.several(len(aggregates.seeds(ordered)), "seed")
    environment = ordered["environment"]
    machine = f"{environment['cpu']}, {environment['cores']} cores" if picture else "virtual time"
    remarks = [f"{seeds}, medians", machine, link]
    if invalid := aggregates.invalid(ordered):
        remarks.append(f"{len(invalid)} of {len(ordered['runs'])} runs not valid and left out")
    if ordered["partial"]:
        remarks.append("**partial: the experiment was interrupted**")
    chart = [f"![Attainment against load]({picture})", ""] if picture else []
    return "\n".join((headline(ordered), "", *chart, *lines, f"({'; '.join(remarks)}.)", ""))


def rates(results: Results) -> str:
    """Of each system, the rate at the first target and the attainment under the highest load: medians."""
    if not aggregates.targets(results):
        return headline(results)
    ordered = aggregates.ordered(results)
    goal, load = aggregates.targets(ordered)[0], aggregates.common_loads(ordered)[-1]
    cells = []
    for system in ordered["systems"]:
        row = aggregates.frontier(ordered, system["name"], goal)
        is_limit = row is not None and aggregates.is_limit(ordered, row)
        rate = formats.reached(row["rps"] if row else None, is_limit=is_limit)
        runs = aggregates.runs_of(ordered, system["name"], load)
        met = _median(aggregates.attained(runs, aggregates.OVERALL))
        cells.append(f"{_system_text(system)}: {rate} ({met})")
    seeds = formats.several(len(aggregates.seeds(ordered)), "seed")
    partial = "; **partial**" if ordered["partial"] else ""
    head = f"rate at {formats.share(goal)} attainment (attainment at {formats.load(load)} load)"
    return f"{head}, {seeds}{partial}:<br>" + "<br>".join(cells)


def _system_text(system: SystemInfo) -> str:
    return f"{system['name']} ({system['description']})" if system["description"] else system["name"]


def _rates_table(results: Results, load: float) -> list[str]:
    goals = aggregates.targets(results)
    rates = [f"req/s at {formats.share(goal)}" for goal in goals]
    rows = (
        [
            _system_text(system),
            *(_rate_cell(results, system["name"], goal) for goal in goals),
            *_met_cells(results, system["name"], load),
        ]
        for system in results["systems"]
    )
    return _table(["system", *rates, *_met_head(results, load)], rows)


def _loads_table(results: Results, loads: Sequence[float]) -> list[str]:
    """Attainment of each system under each load: mean over the seeds and the lowest."""

    def cell(system: str, load: float) -> str:
        runs = aggregates.runs_of(results, system, load)
        attained = [run["attainment"][aggregates.OVERALL] or 0.0 for run in runs]
        return (
            f"{formats.share(fmean(attained))} ({formats.share(min(attained))})"
            if attained
            else formats.ABSENT
        )

    rows = (
        [system["name"], *(cell(system["name"], load) for load in loads)] for system in results["systems"]
    )
    intro = "Mean attainment over the seeds at each load, in parentheses the lowest:"
    return [intro, "", *_table(["system", *(f"{formats.load(load)} load" for load in loads)], rows)]


def _rate_cell(results: Results, system: str, goal: float) -> str:
    if (row := aggregates.frontier(results, system, goal)) is None:
        return formats.ABSENT
    ends, least = aggregates.rates(row), "at least " if aggregates.is_limit(results, row) else ""
    spread = f" ({formats.spread(ends.low, ends.high)})" if ends and ends.low < ends.high else ""
    return f"{least}{formats.figure(row['rps'])}{spread}"


def _met_head(results: Results, load: float) -> list[str]:
    return [f"met at {formats.load(load)} load", *aggregates.classes(results), "rejected", "evicted"]


def _met_cells(results: Results, system: str, load: float) -> list[str]:
    runs = aggregates.runs_of(results, system, load)
    cells = [
        _median(aggregates.attained(runs, name))
        for name in (aggregates.OVERALL, *aggregates.classes(results))
    ]
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["reject"])))
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["evict"])))
    return cells


def _median(over: aggregates.Spread | None) -> str:
    return formats.share(over.median if over else None)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), "|---|" + "--:|" * (len(head) - 1), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
