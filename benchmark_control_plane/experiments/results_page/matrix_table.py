"""Markdown of the results of a matrix: a row for each cell."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.schema import Results, RunFigures

_MIDDLE_LOAD = 1.0
_LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "embedding"}


def full(cells: Mapping[str, Results], link: str) -> str:
    """Attainment of tandem and of the best baseline under each load, and the 99th percentiles at 100 %."""
    first = next(iter(cells.values()))
    loads = aggregates.common_loads(first)
    latencies = [f"P99 {name}" for name in _LATENCIES.values()]
    head = ["cell", "rate of 100 % load", *(f"{formats.load(load)} load" for load in loads), *latencies]
    rows = [
        [
            cell,
            formats.rate(results.get("capacity_rps")),
            *(_attained(results, load) for load in loads),
            *(_latency(results, metric) for metric in _LATENCIES),
        ]
        for cell, results in cells.items()
    ]
    seeds = formats.several(len(aggregates.seeds(first)), "seed")
    intro = (
        "Share of requests that met their SLO: tandem, the best baseline at that load, and in parentheses "
        "tandem's share of the bound in hindsight; then the 99th percentiles at 100 % load of tandem and of "
        "that baseline, of the requests that each delivered."
    )
    remarks = [f"{seeds}, shares means and percentiles medians", "virtual time", link]
    if invalid := sum(len(aggregates.invalid(results)) for results in cells.values()):
        runs = formats.several(invalid, "run")
        remarks.append(f"{runs} not valid; shares are of the seeds that both systems have")
    if any(results["partial"] for results in cells.values()):
        remarks.append("**partial**")
    tables = [*markdown_table(head, rows), *_metrics(cells)]
    return "\n".join((intro, "", *tables, f"({'; '.join(remarks)}.)", ""))


def _figure(stated: Mapping[str, float] | None, name: str) -> float | None:
    """A figure of a run; None in a result that does not state it."""
    return None if stated is None else stated.get(name)


def _memory_use(run: RunFigures) -> float | None:
    counters = run["engine"]
    return None if counters is None else counters.get("memory_use")


def _device_busy(run: RunFigures) -> float | None:
    counters = run["engine"]
    return None if counters is None else counters.get("device_busy")


_METRICS: tuple[tuple[str, Callable[[RunFigures], float | None], Callable[[float | None], str]], ...] = (
    ("req/s that met", lambda run: run["goodput_rps"], formats.figure),
    ("output tokens/s", lambda run: _figure(run.get("tokens_per_s"), "output"), formats.figure),
    ("embedded tokens/s", lambda run: _figure(run.get("tokens_per_s"), "embedded"), formats.figure),
    ("memory held", _memory_use, formats.share),
    ("device busy", _device_busy, formats.share),
    ("rejected", lambda run: run["rates"]["reject"], formats.share),
    ("evicted", lambda run: run["rates"]["evict"], formats.share),
    ("failed", lambda run: run["rates"]["fail"], formats.share),
    ("priority gap", lambda run: run["fairness"]["priority_gap"], formats.figure),
)


def _metrics(cells: Mapping[str, Results]) -> list[str]:
    """Further metrics at 100 % load."""
    rows = []
    for cell, results in cells.items():
        tandem = aggregates.tandem_system(results)
        names = [tandem["name"] if tandem else None, _best_baseline(results, _MIDDLE_LOAD)]
        at = [aggregates.runs_of(results, name, _MIDDLE_LOAD) if name else [] for name in names]
        rows.append([cell, *(_pair(at, value, text) for _, value, text in _METRICS)])
    intro = (
        "At 100 % load, tandem and the best baseline there; tokens are those of delivered requests that "
        "arrived in the window, over its seconds:"
    )
    return [intro, "", *markdown_table(["cell", *(name for name, _, _ in _METRICS)], rows)]


def _pair(
    at: Sequence[list[RunFigures]],
    value: Callable[[RunFigures], float | None],
    text: Callable[[float | None], str],
) -> str:
    over = (aggregates.over_seeds(runs, value) for runs in at)
    return ", ".join(text(spread.median if spread else None) for spread in over)


def _attained(results: Results, load: float) -> str:
    tandem = aggregates.tandem_system(results)
    own = aggregates.runs_of(results, tandem["name"], load) if tandem else []
    if not own:
        return formats.ABSENT
    best = _best_baseline(results, load)
    theirs = aggregates.runs_of(results, best, load) if best else []
    if theirs:
        both = {run["seed"] for run in own} & {run["seed"] for run in theirs}
        own, theirs = ([run for run in runs if run["seed"] in both] for runs in (own, theirs))
    if not own:
        return formats.ABSENT
    of_bound = [share for run in own if (share := aggregates.share_of_bound(run)) is not None]
    text = ", ".join(formats.share(_mean(runs)) for runs in (own, theirs) if runs)
    return f"{text} ({formats.share(fmean(of_bound))})" if of_bound else text


def _mean(runs: list[RunFigures]) -> float:
    return fmean(run["attainment"][aggregates.OVERALL] or 0.0 for run in runs)


def _best_baseline(results: Results, load: float) -> str | None:
    found = {
        system["name"]: _mean(runs)
        for system in results["systems"]
        if system["kind"] == "baseline" and (runs := aggregates.runs_of(results, system["name"], load))
    }
    return max(found, key=found.__getitem__, default=None)


def _latency(results: Results, metric: str) -> str:
    """Over the classes that have the metric; embeddings have no TPOT."""
    tandem = aggregates.tandem_system(results)
    names = [tandem["name"] if tandem else None, _best_baseline(results, _MIDDLE_LOAD)]
    found = []
    for name in names:
        values = [
            figure[0]
            for run in (aggregates.runs_of(results, name, _MIDDLE_LOAD) if name else [])
            for by_metric in run["percentiles"].values()
            if ("tpot_ms" in by_metric) == (metric != "e2e_ms")
            and (figure := by_metric.get(metric, {}).get("p99"))
            and figure[0] is not None
        ]
        found.append(formats.milliseconds(median(values)) if values else formats.ABSENT)
    return ", ".join(found)
