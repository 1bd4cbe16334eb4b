"""Markdown of the results of `tandem bench run`: one experiment in full, or its rates in one cell."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.leads import lead_over_best
from benchmark_control_plane.report.schema import Results, RunFigures, SystemInfo

_CHANGED = "working tree with changes that the commit lacks"


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
    machine = ", ".join(
        [environment["cpu"], f"{environment['cores']} cores", *filter(None, [environment.get("gpu")])]
    )
    remarks = [f"{seeds}, medians", machine if picture else "virtual time", link]
    if _is_changed(ordered):
        remarks.append(_CHANGED)
    if others := [run["other_cores"] for run in ordered["runs"] if "other_cores" in run]:
        remarks.append(f"other processes used {fmean(others):.2f} cores, at most {max(others):.2f} in a run")
    if invalid := aggregates.invalid(ordered):
        remarks.append(f"{len(invalid)} of {len(ordered['runs'])} runs not valid and left out")
        valid = {_cell_of(run) for run in ordered["runs"] if run["valid"]}
        if empty := sorted({cell for run in invalid if (cell := _cell_of(run)) not in valid}):
            cells = [f"{system} at {formats.load(load)}, seed {seed}" for system, load, seed in empty]
            remarks.append(f"without a valid run: {', '.join(cells)}")
    if ordered["partial"]:
        remarks.append("**partial: the experiment was interrupted**")
        if missing := not_measured(ordered):
            remarks.append(f"**not measured: {', '.join(missing)}**")
    chart = [f"![Attainment against load]({picture})", ""] if picture else []
    return "\n".join((headline(ordered), "", *chart, *lines, f"({'; '.join(remarks)}.)", ""))


def _cell_of(run: RunFigures) -> tuple[str, float, int]:
    return run["system"], run["load"], run["seed"]


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
        if (of_bound := aggregates.over_seeds(runs, aggregates.share_of_bound)) is not None:
            met += f", {_median(of_bound)} of the bound"
        cells.append(f"{_system_text(system)}: {rate} ({met})")
    seeds = formats.several(len(aggregates.seeds(ordered)), "seed")
    changed = f"; {_CHANGED}" if _is_changed(ordered) else ""
    partial = "; **partial**" if ordered["partial"] else ""
    head = f"rate at {formats.share(goal)} attainment (attainment at {formats.load(load)} load)"
    return f"{head}, {seeds}{changed}{partial}:<br>" + "<br>".join(cells)


def _is_changed(results: Results) -> bool:
    return (results["environment"]["commit"] or "").endswith("changed since")


def not_measured(results: Results) -> list[str]:
    """Systems of an interrupted experiment without a run."""
    measured = {run["system"] for run in results["runs"]}
    return [system["name"] for system in results["systems"] if system["name"] not in measured]


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
    return markdown_table(["system", *rates, *_met_head(results, load)], rows)


def _loads_table(results: Results, loads: Sequence[float]) -> list[str]:
    """Attainment of each system at each load, mean and lowest, and the lead over the best baseline there."""
    planned = len(aggregates.seeds(results))

    def cell(system: str, load: float) -> str:
        runs = aggregates.runs_of(results, system, load)
        if not (found := [run["attainment"][aggregates.OVERALL] or 0.0 for run in runs]):
            return formats.ABSENT
        of_bound = _mean_of_bound(results, system, load, aggregates.share_of_bound)
        fewer = f"; {formats.several(len(found), 'seed')}" if len(found) < planned else ""
        return f"{formats.share(fmean(found))} ({formats.share(min(found))}{of_bound}{fewer})"

    rows = [
        [system["name"], *(cell(system["name"], load) for load in loads)] for system in results["systems"]
    ]
    baselines = [system["name"] for system in results["systems"] if system["kind"] == "baseline"]
    tandem = next((system["name"] for system in results["systems"] if system["kind"] == "tandem"), None)

    # Which baseline is the best is not known before each has run.
    if tandem and baselines and not set(baselines) & set(not_measured(results)):
        found = (lead_over_best(results, tandem, baselines, load) for load in loads)
        points = (formats.ABSENT if lead is None else f"{lead.points:+.1f}" for lead in found)
        rows.append([f"{tandem} less the best baseline at this load, points", *points])
    intro = "Mean attainment over the seeds at each load, in parentheses the lowest"
    if aggregates.has_bounds(results):
        intro += " and the mean share of the bound in hindsight"
        share, first = aggregates.attainable_share(results), results["systems"][0]["name"]
        reached = (_mean_of_bound(results, first, load, share) for load in loads)
        rows.append(
            ["attainable on the requests and device of the first system, share of the bound",
             *(text[2:] for text in reached)]
        )  # fmt: skip
    intro += ":"
    return [intro, "", *markdown_table(["system", *(f"{formats.load(load)} load" for load in loads)], rows)]


def _mean_of_bound(
    results: Results, system: str, load: float, share: Callable[[RunFigures], float | None]
) -> str:
    """Mean over the seeds after a semicolon; nothing without bounds."""
    found = [value for run in aggregates.runs_of(results, system, load) if (value := share(run)) is not None]
    return f"; {formats.share(fmean(found))}" if found else ""


def _rate_cell(results: Results, system: str, goal: float) -> str:
    if (row := aggregates.frontier(results, system, goal)) is None:
        return formats.ABSENT
    ends, least = aggregates.rates(row), "at least " if aggregates.is_limit(results, row) else ""
    notes = []
    if ends and ends.low < ends.high:
        has_limit = aggregates.has_limit(results, row)
        notes.append(formats.reached_range(ends.low, ends.high, is_limit=has_limit))
    if aggregates.seeds_left_out(results, row):
        notes.append(formats.several(len(row["per_seed"]), "seed"))
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{least}{formats.figure(row['rps'])}{note}"


def _met_head(results: Results, load: float) -> list[str]:
    of_bound = ["of the bound"] if aggregates.has_bounds(results) else []
    return [
        f"met at {formats.load(load)} load",
        *of_bound,
        *aggregates.classes(results),
        "rejected",
        "evicted",
    ]


def _met_cells(results: Results, system: str, load: float) -> list[str]:
    runs = aggregates.runs_of(results, system, load)
    cells = [_median(aggregates.attained(runs, aggregates.OVERALL))]
    if aggregates.has_bounds(results):
        cells.append(_median(aggregates.over_seeds(runs, aggregates.share_of_bound)))
    cells += [_median(aggregates.attained(runs, name)) for name in aggregates.classes(results)]
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["reject"])))
    cells.append(_median(aggregates.over_seeds(runs, lambda run: run["rates"]["evict"])))
    return cells


def _median(over: aggregates.Spread | None) -> str:
    return formats.share(over.median if over else None)


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, has_texts: bool = False
) -> list[str]:
    """A table whose columns after the first hold figures, or with `has_texts` texts."""
    return [_line(head), "|---|" + ("---|" if has_texts else "--:|") * (len(head) - 1), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
