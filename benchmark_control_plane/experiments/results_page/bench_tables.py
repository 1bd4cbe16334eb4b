"""Markdown of the results of `tandem bench run`: one experiment in full, or its rates in one cell."""

from collections.abc import Iterable, Sequence

from benchmark_control_plane.experiments.results_page.result_rows import system_text
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.schema import Results


def full(results: Results, picture: str, link: str) -> str:
    """Headline, chart, and the systems side by side: rates, attainment under the highest load, losses.

    Systems that were not run under the highest load get a second table, together with all others, under the
    highest load that they share.
    """
    ordered = aggregates.ordered(results)
    names, loads = [system["name"] for system in ordered["systems"]], aggregates.loads(ordered)
    at_highest = [name for name in names if loads and aggregates.runs_of(ordered, name, loads[-1])]
    lines = _rates_table(ordered, at_highest, loads[-1]) if at_highest else []
    lines += _shared_table(ordered, [name for name in names if name not in at_highest])
    seeds = formats.several(len(aggregates.seeds(ordered)), "seed")
    machine = f"{ordered['environment']['cpu']}, {ordered['environment']['cores']} cores"
    remarks = [f"{seeds}, medians", machine, link]
    if invalid := aggregates.invalid(ordered):
        remarks.append(f"{len(invalid)} of {len(ordered['runs'])} runs not valid and left out")
    if ordered["partial"]:
        remarks.append("**partial: the experiment was interrupted**")
    chart = f"![Attainment against load]({picture})"
    return "\n".join((headline(ordered), "", chart, "", *lines, f"({'; '.join(remarks)}.)", ""))


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
        cells.append(f"{system_text(system['name'])}: {rate} ({met})")
    seeds = formats.several(len(aggregates.seeds(ordered)), "seed")
    partial = "; **partial**" if ordered["partial"] else ""
    head = f"rate at {formats.share(goal)} attainment (attainment at {formats.load(load)} load)"
    return f"{head}, {seeds}{partial}:<br>" + "<br>".join(cells)


def _rates_table(results: Results, systems: Sequence[str], load: float) -> list[str]:
    goals = aggregates.targets(results)
    rates = [f"req/s at {formats.share(goal)}" for goal in goals]
    rows = (
        [
            system_text(name),
            *(_rate_cell(results, name, goal) for goal in goals),
            *_met_cells(results, name, load),
        ]
        for name in systems
    )
    return _table(["system", *rates, *_met_head(results, load)], rows)


def _shared_table(results: Results, few: Sequence[str]) -> list[str]:
    """All systems under the highest load of these few, on the seeds that they have in common."""
    loads = [run["load"] for run in results["runs"] if run["system"] in few and run["valid"]]
    if not loads:
        return []
    load = max(loads)
    seeds = [{run["seed"] for run in aggregates.runs_of(results, name, load)} for name in few]
    shared = set.intersection(*filter(None, seeds))
    same: Results = {**results, "runs": [run for run in results["runs"] if run["seed"] in shared]}
    rows = (
        [system_text(system["name"]), *_met_cells(same, system["name"], load)]
        for system in results["systems"]
    )
    seeds_text = ", ".join(map(str, sorted(shared)))
    intro = f"All systems under one load, on the seeds that are valid for all ({seeds_text}):"
    return [intro, "", *_table(["system", *_met_head(results, load)], rows)]


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
