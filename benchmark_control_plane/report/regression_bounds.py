"""Checks results against the bounds of a project and reports each violation.

A bound limits a metric, by its path in a run of results.json, to `min`, `max` or both; without `system` or
`load` it applies to all of them. The median over the valid seeds counts, with `seeds: worst` the worst
seed. `max_goodput_rate` is bounded by `target` instead of by load. Partial results and metrics that were
not measured are violations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from benchmark_control_plane.common.command_line import BadInput, finite
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.schema import Results, RunFigures

FRONTIER = "max_goodput_rate"
_SEEDS = ("median", "worst")


@dataclass(frozen=True)
class Bound:
    """One entry of the bounds file."""

    metric: str
    min: float | None = None
    max: float | None = None
    system: str | None = None
    load: float | None = None
    target: float | None = None
    seeds: str = "median"

    def complaint(self, spread: aggregates.Spread | None, where: str) -> str | None:
        """The violation at `where`, or None."""
        if spread is None:
            return f"{where}: {self.metric} was not measured in any valid run"
        low, high = (spread.low, spread.high) if self.seeds == "worst" else (spread.median, spread.median)
        if self.min is not None and low < self.min:
            return f"{where}: {self.metric} is {low:.4g}; at least {self.min:.4g} is required"
        if self.max is not None and high > self.max:
            return f"{where}: {self.metric} is {high:.4g}; at most {self.max:.4g} is required"
        return None


def read_bounds(path: Path) -> list[Bound]:
    """Reads a YAML file of bounds. Raises BadInput naming the entry, the rule and the remedy."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; give the path of a readable YAML file") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or set(content) != {"bounds"} or not isinstance(content["bounds"], list):
        raise BadInput(
            f"{path}: one key `bounds` with a list is needed, as in configs/bench/gate-example.yaml"
        )
    if not content["bounds"]:
        raise BadInput(f"{path}: bounds=[]: a gate without bounds checks nothing; state at least one")
    return [_bound(entry, f"{path}: bounds.{number}") for number, entry in enumerate(content["bounds"])]


def violations(results: Results, bounds: list[Bound]) -> Iterator[str]:
    """Yields one line per bound and place that violates it."""
    if results["partial"]:
        yield "the results are partial: the experiment was interrupted; run it to its end"
    for bound in bounds:
        yield from _broken_rates(results, bound) if bound.metric == FRONTIER else _broken_runs(results, bound)


def _broken_rates(results: Results, bound: Bound) -> Iterator[str]:
    rows = [
        row
        for row in results["max_goodput_rate"]
        if bound.system in (None, row["system"]) and bound.target in (None, row["target"])
    ]
    if not rows:
        yield f"{bound.metric}: no row for system {bound.system or 'any'}, target {bound.target or 'any'}"
    for row in rows:
        # A seed that reached the target at no rate counts as rate 0.
        values = [0.0 if value is None else value for value in row["per_seed"]] or [row["rps"] or 0.0]
        if line := bound.complaint(
            aggregates.spread(values), f"{row['system']} at {formats.share(row['target'])}"
        ):
            yield line


def _broken_runs(results: Results, bound: Bound) -> Iterator[str]:
    places = sorted(
        {
            (run["system"], run["load"])
            for run in results["runs"]
            if bound.system in (None, run["system"]) and bound.load in (None, run["load"])
        }
    )
    if not places:
        load = "any" if bound.load is None else formats.load(bound.load)
        yield f"{bound.metric}: no run of system {bound.system or 'any'} at load {load}"
    for system, load_value in places:
        runs = aggregates.runs_of(results, system, load_value)
        spread = aggregates.over_seeds(runs, lambda run: value_at(run, bound.metric))
        if line := bound.complaint(spread, f"{system} at {formats.load(load_value)} load"):
            yield line


def value_at(run: RunFigures, path: str) -> float | None:
    """The number at a path such as `percentiles.chat.ttft_ms.p99`, without its interval."""
    value: Any = run
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, list) and value:
        value = value[0]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _bound(entry: object, where: str) -> Bound:
    known = {field.name for field in fields(Bound)}
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: a mapping is needed, not {type(entry).__name__}")
    if unknown := sorted(map(str, set(entry) - known)):
        raise BadInput(f"{where}.{unknown[0]}: unknown; known are {', '.join(sorted(known))}")
    for key in ("metric", "system"):
        if key in entry and not isinstance(entry[key], str):
            raise BadInput(f"{where}.{key}={entry[key]!r}: a name is needed")
    if "metric" not in entry:
        raise BadInput(f"{where}.metric: missing; it is required, for example attainment.overall")
    if "min" not in entry and "max" not in entry:
        raise BadInput(f"{where}: neither min nor max; state at least one")
    if entry.get("seeds", "median") not in _SEEDS:
        raise BadInput(f"{where}.seeds={entry['seeds']!r}: one of {', '.join(_SEEDS)} is needed")
    misplaced = "load" if entry["metric"] == FRONTIER else "target"
    if misplaced in entry:
        other = "target" if misplaced == "load" else "load"
        raise BadInput(
            f"{where}.{misplaced}: {entry['metric']} is measured by {other}; state {other} instead"
        )
    numbers = {
        key: finite(entry[key], f"{where}.{key}") for key in ("min", "max", "load", "target") if key in entry
    }
    if numbers.get("min", 0.0) > numbers.get("max", float("inf")):
        raise BadInput(f"{where}: min={numbers['min']:g} is above max={numbers['max']:g}; swap them")
    return Bound(**{**entry, **numbers})
