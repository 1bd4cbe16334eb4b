"""Aggregates the runs of an experiment over seeds; runs that are not valid are excluded."""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from benchmark_control_plane.report.schema import FrontierRow, HindsightBound, Results, RunFigures, SystemInfo

OVERALL = "overall"


@dataclass(frozen=True)
class Spread:
    """Median and range over the seeds of one system under one load."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the measured values; None if there are none."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return Spread(statistics.median(measured), min(measured), max(measured), len(measured))


_KIND_ORDER = {"tandem": 0, "baseline": 1, "ablation": 2, "what-if": 3}


def ordered(results: Results) -> Results:
    """Results with systems sorted by kind: Tandem, baselines, ablations, what-ifs, others."""
    systems = sorted(results["systems"], key=lambda system: _KIND_ORDER.get(system["kind"], len(_KIND_ORDER)))
    return {**results, "systems": systems}


def loads(results: Results) -> list[float]:
    return sorted({run["load"] for run in results["runs"]})


def common_loads(results: Results) -> list[float]:
    """Loads with at least half as many runs as the most frequent one; excludes loads of a rate search."""
    runs = Counter(run["load"] for run in results["runs"])
    return sorted(load for load, count in runs.items() if 2 * count >= max(runs.values()))


def seeds(results: Results) -> list[int]:
    return sorted({run["seed"] for run in results["runs"]})


def classes(results: Results) -> list[str]:
    """Measured classes in the order of the objectives; classes without objectives come last."""
    measured = {name for run in results["runs"] for name in run["attainment"]} - {OVERALL}
    named = list(results["slos"])
    return [*(name for name in named if name in measured), *sorted(measured - set(named))]


def runs_of(results: Results, system: str, load: float) -> list[RunFigures]:
    """Valid runs of a system under a load, sorted by seed."""
    runs = (r for r in results["runs"] if r["system"] == system and r["load"] == load and r["valid"])
    return sorted(runs, key=lambda run: run["seed"])


def over_seeds(runs: Sequence[RunFigures], value: Callable[[RunFigures], float | None]) -> Spread | None:
    return spread(value(run) for run in runs)


def attained(runs: Sequence[RunFigures], name: str) -> Spread | None:
    return over_seeds(runs, lambda run: run["attainment"].get(name))


def share_of_bound(run: RunFigures) -> float | None:
    """Attainment of a run as a share of its bound in hindsight; None without a bound."""
    bound, attained = run.get("bound"), run["attainment"].get(OVERALL)
    return attained / bound["attainment"] if bound and bound["attainment"] and attained is not None else None


def attainable_share(results: Results) -> Callable[[RunFigures], float | None]:
    """Of a run: what is known to be attainable on its requests and device, as a share of the bound.

    The schedule with hindsight, or a system of the same experiment that attained more.
    """
    best: dict[tuple[float, ...], float] = {}
    for run in results["runs"]:
        if bound := run.get("bound"):
            own = max(bound["feasible"], run["attainment"].get(OVERALL) or 0.0 if run["valid"] else 0.0)
            key = _same_requests(run, bound)
            best[key] = max(best.get(key, 0.0), own)

    def share(run: RunFigures) -> float | None:
        bound = run.get("bound")
        if not bound or not bound["attainment"]:
            return None
        return best[_same_requests(run, bound)] / bound["attainment"]

    return share


def _same_requests(run: RunFigures, bound: HindsightBound) -> tuple[float, ...]:
    return run["load"], run["seed"], bound["attainment"], bound["feasible"]


def has_bounds(results: Results) -> bool:
    return any(run.get("bound") for run in results["runs"])


def invalid(results: Results) -> list[RunFigures]:
    return [run for run in results["runs"] if not run["valid"]]


def tandem_system(results: Results) -> SystemInfo | None:
    return next((system for system in results["systems"] if system["kind"] == "tandem"), None)


def targets(results: Results) -> list[float]:
    return sorted({frontier["target"] for frontier in results["max_goodput_rate"]}, reverse=True)


def frontier(results: Results, system: str, target: float) -> FrontierRow | None:
    rows = results["max_goodput_rate"]
    return next((row for row in rows if row["system"] == system and row["target"] == target), None)


def rates(row: FrontierRow) -> Spread | None:
    """Spread over the seeds; a seed that reached the target at no rate counts as 0. None if no seed did."""
    return spread(rate or 0.0 for rate in row["per_seed"]) if any(row["per_seed"]) else None


def seeds_left_out(results: Results, row: FrontierRow) -> bool:
    """Whether the row has fewer seeds than the experiment."""
    return len(row["per_seed"]) < len(seeds(results))


def rate_by_seed(row: FrontierRow) -> dict[int, float]:
    """The rate on each seed; 0 where the target was reached at no rate."""
    seeds = row.get("seeds", range(len(row["per_seed"])))
    return {seed: rate or 0.0 for seed, rate in zip(seeds, row["per_seed"], strict=True)}


def paired_rates(own: FrontierRow, other: FrontierRow) -> list[tuple[float, float]]:
    """The rates of both systems on each seed that both have."""
    ours, theirs = rate_by_seed(own), rate_by_seed(other)
    return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def median_rate(rates: Iterable[float | None]) -> float | None:
    """Median rate over the seeds; None counts as the lowest, and is the result if it is the lower median."""
    rising = sorted(rate or 0.0 for rate in rates)
    return statistics.median(rising) if rising and rising[(len(rising) - 1) // 2] else None


def is_limit(results: Results, row: FrontierRow) -> bool:
    """Whether the target was reached under every offered load, so that the rate is a lower bound."""
    return _is_highest(results, row, row["rps"])


def has_limit(results: Results, row: FrontierRow) -> bool:
    """Whether the rate of any seed is a lower bound."""
    return any(_is_highest(results, row, rate) for rate in row["per_seed"])


def _is_highest(results: Results, row: FrontierRow, rate: float | None) -> bool:
    capacity = results.get("capacity_rps")
    loads = [run["load"] for run in results["runs"] if run["system"] == row["system"] and run["valid"]]
    return bool(rate and capacity and loads and rate >= 0.999 * max(loads) * capacity)


def best_baseline(results: Results, target: float, names: Collection[str]) -> FrontierRow | None:
    """That of the baselines `names` with the highest rate at this target; None if none reached it."""
    rows = [row for row in results["max_goodput_rate"] if row["system"] in names and row["target"] == target]
    reached = [row for row in rows if row["rps"] is not None]
    return max(reached, key=lambda row: row["rps"] or 0.0, default=None)
