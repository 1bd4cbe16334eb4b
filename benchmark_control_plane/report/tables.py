"""Builds the tables of the page; every table of goodput also shows rejected and evicted shares."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.elements import Child, el, join, render_template
from benchmark_control_plane.report.outcome_chart import Bars
from benchmark_control_plane.report.schema import METRICS, Figure, FrontierRow, Memory, Results, RunFigures
from benchmark_control_plane.report.series_style import sign

Row = Sequence[Child]

_Column = tuple[str, Callable[[RunFigures], float | None], Callable[[float | None], str]]


def table(
    caption: str, head: Sequence[str], rows: Iterable[Row], *, row_classes: Sequence[str] = ()
) -> Markup:
    """A table; the first cell of each row is its heading."""
    return render_template("table", caption=caption, head=head, rows=list(rows), row_classes=row_classes)


def systems_table(results: Results, load: float) -> Markup:
    """Medians over the seeds with their ranges, at one load."""
    names = aggregates.classes(results)
    overall, *by_class = _attainment_columns(names)
    columns = [overall, *_of_bound(results), *_COLUMNS[: len(_ALWAYS)], *by_class, *_COLUMNS[len(_ALWAYS) :]]
    columns = [c for c in columns if c[0] in _ALWAYS or any(_has(c, run) for run in results["runs"])]
    rows = []
    for number, system in enumerate(results["systems"]):
        runs = aggregates.runs_of(results, system["name"], load)
        cells = [_cell(aggregates.over_seeds(runs, value), text) for _, value, text in columns]
        rows.append([named(number, system["name"]), *cells, f"{len(runs)}"])
    head = ["system", *(name for name, _, _ in columns), "valid seeds"]
    caption = f"Medians over the seeds at {formats.load(load)} load, with their ranges"
    return table(caption, head, rows, row_classes=_kinds(results))


def frontier_table(results: Results) -> Markup:
    """Highest rate of each system at each target."""
    goals = aggregates.targets(results)
    rows = []
    for number, system in enumerate(results["systems"]):
        cells: list[Child] = []
        for goal in goals:
            row = aggregates.frontier(results, system["name"], goal)
            cells.append(_rate_cell(results, row) if row else formats.ABSENT)
        rows.append([named(number, system["name"]), *cells])
    head = ["system", *(f"{formats.share(goal)} attainment" for goal in goals)]
    caption = "Highest offered rate at a stated attainment, with its range over the seeds"
    return table(caption, head, rows, row_classes=_kinds(results))


def _rate_cell(results: Results, row: FrontierRow) -> Markup:
    ends, is_limit = aggregates.rates(row), aggregates.is_limit(results, row)
    has_limit = aggregates.has_limit(results, row)
    notes = [formats.reached_range(ends.low, ends.high, is_limit=has_limit)] if ends else []
    if aggregates.seeds_left_out(results, row):
        notes.append(formats.several(len(row["per_seed"]), "seed"))
    return _two_lines(formats.reached(row["rps"], is_limit=is_limit), "; ".join(notes))


def attainment_table(results: Results, name: str) -> Markup:
    """Attainment of a class by system and load."""
    loads = aggregates.loads(results)
    rows = []
    for number, system in enumerate(results["systems"]):
        places = (aggregates.runs_of(results, system["name"], load) for load in loads)
        cells = (_attained_cell(runs, name) for runs in places)
        rows.append([named(number, system["name"]), *cells])
    caption = f"Attainment of {name}: median over the seeds, and range"
    if name == aggregates.OVERALL and aggregates.has_bounds(results):
        caption += "; then its share of the bound in hindsight"
    return table(caption, ["system", *map(formats.load, loads)], rows)


def percentile_table(results: Results, load: float, service_class: str) -> Markup | None:
    """Medians over the seeds of each run's percentiles of delivered requests; None if there are none.

    A single seed is shown with the confidence interval of its own requests.
    """
    metrics = [m for m in METRICS if any(_figure(run, service_class, m, "p50") for run in results["runs"])]
    if not metrics:
        return None
    rows = []
    for number, system in enumerate(results["systems"]):
        runs = aggregates.runs_of(results, system["name"], load)
        delivered = aggregates.over_seeds(runs, lambda run: run.get("delivered", {}).get(service_class))
        cells = [_cell(delivered, formats.share)]
        for metric in metrics:
            for rank in ("p50", "p90", "p99"):
                figures = [_figure(run, service_class, metric, rank) for run in runs]
                cells.append(_cell(_over_seeds(figures), formats.milliseconds))
        rows.append([named(number, system["name"]), *cells])
    names = (f"{_SHORT[metric]} {rank}" for metric in metrics for rank in ("p50", "p90", "p99"))
    head = ["system", "delivered", *names]
    caption = (
        f"Latency of delivered requests, {service_class}, at {formats.load(load)} load: median over the "
        "seeds, and range; of a single seed, its 95 % interval"
    )
    return table(caption, head, rows)


def shares_table(caption: str, bars: Bars, names: Mapping[str, str]) -> Markup:
    """The figures of a chart of shares."""
    rows = []
    for label, parts in bars:
        total = sum(parts.values())
        cells = (f"{formats.count(parts[part])} ({formats.share(parts[part] / total)})" for part in names)
        rows.append([label, *cells])
    return table(caption, ["system", *names.values()], rows)


def memory_table(memory: Memory, what: str) -> Markup:
    """Maximum and mean memory of each owner, and its quota."""
    unit = memory.get("unit", "blocks")
    rows = [
        [
            owner,
            formats.figure(max(held)),
            formats.figure(statistics.fmean(held)),
            _quota_text(memory["quota_by_owner"].get(owner)),
        ]
        for owner, held in memory["by_owner"].items()
    ]
    return table(f"Memory by owner, {what}", ["owner", f"most, {unit}", "mean of samples", "quota"], rows)


def runs_table(results: Results) -> Markup:
    """All runs with their send delays, and why a run is not valid."""
    bounds = _of_bound(results) if aggregates.has_bounds(results) else []
    delays = ["send delay p50", "p99", "max"]
    head = ["system", "load", "seed", "offered", "duration", *(c[0] for c in bounds), *delays, "valid"]
    rows, states = [], []
    for run in results["runs"]:
        late = run["send_lateness_ms"]
        valid = "yes" if run["valid"] else f"NO: {run['why_invalid'] or 'no reason given'}"
        states.append("ok" if run["valid"] else "refused")
        rows.append(
            [
                run["system"],
                formats.load(run["load"]),
                f"{run['seed']}",
                formats.rate(run["offered_rps"]),
                f"{formats.figure(run['duration_s'])} s",
                *(formats.share(value(run)) for _, value, _ in bounds),
                *(formats.milliseconds(value) for value in (late["p50"], late["p99"], late["max"])),
                valid,
            ]
        )
    return table("All runs, and the send delay of their requests", head, rows, row_classes=states)


def descriptions_table(results: Results) -> Markup:
    """Kind and description of each system."""
    rows = [
        [named(number, system["name"]), system["kind"], system["description"]]
        for number, system in enumerate(results["systems"])
    ]
    return table("Systems", ["system", "kind", "description"], rows)


def objectives_table(results: Results) -> Markup:
    """Objectives by class, with the latency of a single request if that was measured."""
    alone = results.get("unloaded_ms", {})

    def cell(name: str, metric: str) -> str:
        bound, unloaded = results["slos"][name].get(metric), alone.get(name, {}).get(metric)
        if unloaded is None:
            return formats.milliseconds(bound)
        return f"{formats.milliseconds(bound)} (unloaded {formats.milliseconds(unloaded)})"

    stated = {metric for objectives in results["slos"].values() for metric in objectives}
    metrics = [metric for metric in _SHORT_OBJECTIVES if metric != "gap_ms" or metric in stated]
    rows = [[name, *(cell(name, metric) for metric in metrics)] for name in results["slos"]]
    return table("Objectives by class", ["class", *(_SHORT_OBJECTIVES[metric] for metric in metrics)], rows)


def sweeps_table(results: Results) -> Markup:
    """Variants that were tried to choose the best of each system; empty if there were none."""
    rows = [
        [sweep["system"], formats.load(sweep["load"]), name, formats.share(attainment), chosen]
        for sweep in results.get("sweeps", [])
        for name, attainment in sweep["attainment"].items()
        for chosen in ("yes" if name == sweep["chosen"] else "",)
    ]
    if not rows:
        return Markup()
    head = ["system", "load", "variant", "attainment", "chosen"]
    return table("Variants tried first, on a separate seed", head, rows)


def conditions_table(results: Results) -> Markup:
    """Start, reference rate, seeds, commit, machine and versions."""
    environment = results["environment"]
    rows = [
        ["started", results["started"]],
        ["100 % load", formats.rate(results.get("capacity_rps"))],
        ["seeds", ", ".join(map(str, aggregates.seeds(results))) or formats.ABSENT],
        ["commit", environment["commit"] or formats.ABSENT],
        ["machine", f"{environment['cpu']}, {environment['cores']} cores, {environment['platform']}"],
        *([["GPU", environment["gpu"]]] if "gpu" in environment else []),
        ["Python", environment["python"]],
        *([name, version] for name, version in sorted(environment["versions"].items())),
    ]
    return table("Environment", ["item", "value"], rows)


def named(number: int, system: str) -> Markup:
    """The name of a system with its colour swatch."""
    return el("span", el("i", class_="swatch", aria_hidden="true"), system, class_=f"name {sign(number)}")


def _attainment_columns(names: Sequence[str]) -> list[_Column]:
    def of(name: str) -> Callable[[RunFigures], float | None]:
        return lambda run: run["attainment"].get(name)

    return [(f"{name} met", of(name), formats.share) for name in (aggregates.OVERALL, *names)]


def _of_bound(results: Results) -> list[_Column]:
    return [
        ("share of the bound", aggregates.share_of_bound, formats.share),
        ("attainable share of it", aggregates.attainable_share(results), formats.share),
    ]


def _attained_cell(runs: Sequence[RunFigures], name: str) -> Markup:
    of_bound = aggregates.over_seeds(runs, aggregates.share_of_bound)
    cell = _cell(aggregates.attained(runs, name), formats.share)
    if of_bound is None or name != aggregates.OVERALL:
        return cell
    return join(cell, el("small", f"{formats.share(of_bound.median)} of the bound"))


def _from(section: str, key: str) -> Callable[[RunFigures], float | None]:
    def value(run: RunFigures) -> float | None:
        part = run.get(section)
        return part.get(key) if isinstance(part, dict) else None

    return value


_COLUMNS: list[_Column] = [
    ("goodput", lambda run: run["goodput_rps"], formats.rate),
    ("rejected", _from("rates", "reject"), formats.share),
    ("evicted", _from("rates", "evict"), formats.share),
    ("aborted", _from("rates", "abort"), formats.share),
    ("failed", _from("rates", "fail"), formats.share),
    ("Jain fairness", _from("fairness", "jain"), formats.figure),
    ("priority gap", _from("fairness", "priority_gap"), formats.figure),
    ("preemptions", _from("engine", "preemptions"), formats.count),
    ("tokens recomputed", _from("engine", "recompute_tokens"), formats.count),
    ("over quota", _from("engine", "overflow"), formats.share),
    ("cache hits", _from("engine", "cache_hit"), formats.share),
    ("device busy", _from("engine", "device_busy"), formats.share),
]
_ALWAYS = ("goodput", "rejected", "evicted", "aborted", "failed")
_SHORT_OBJECTIVES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "e2e", "gap_ms": "longest gap"}
_SHORT = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "tbt_ms": "gap", "e2e_ms": "e2e"}


def _has(column: _Column, run: RunFigures) -> bool:
    return column[1](run) is not None


def _figure(run: RunFigures, service_class: str, metric: str, rank: str) -> Figure | None:
    return run["percentiles"].get(service_class, {}).get(metric, {}).get(rank)


def _over_seeds(figures: Sequence[Figure | None]) -> aggregates.Spread | None:
    match figures:
        case [[(int() | float()) as value, (int() | float()) as low, (int() | float()) as high]]:
            return aggregates.Spread(value, low, high, 1)
        case _:
            return aggregates.spread(figure[0] for figure in figures if figure)


def _cell(over: aggregates.Spread | None, text: Callable[[float | None], str]) -> Markup:
    if over is None:
        return join(formats.ABSENT)
    return _two_lines(text(over.median), _range(text(over.low), text(over.high)))


def _quota_text(quota: float | list[float] | None) -> str:
    if isinstance(quota, list):
        return formats.spread(min(quota), max(quota)) if quota else formats.ABSENT
    return formats.figure(quota)


def _range(low: str, high: str) -> str | None:
    """Both ends with the unit once; None if they are formatted alike."""
    unit = low.rpartition(" ")[2]
    return (
        None
        if low == high
        else f"{low.removesuffix(unit).rstrip() if high.endswith(unit) else low} to {high}"
    )


def _two_lines(main: str, below: str | None) -> Markup:
    return join(main, el("small", below) if below else None)


def _kinds(results: Results) -> list[str]:
    return [system["kind"] for system in results["systems"]]
