"""Simulates the rows of a sweep: policies, ages of reports, numbers of choices and routers, and faults."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.fleet_studies.study_file import (
    FleetSection,
    LoadSection,
    SweepCell,
    SweepStudy,
)
from benchmark_control_plane.judge.workload import plan_requests
from benchmark_control_plane.simulator.cluster.cells import FleetTotals
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import (
    FleetOutcome,
    FleetResult,
    FleetScenario,
    FleetWorkload,
)

_SCENARIO_FIELDS = ("policy", "choices", "routers", "retries")
_LOST_ROUTER = 1


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row that is to be simulated; `label` has the cell and the values of the axes as they are stored."""

    label: Mapping[str, Any]
    scenario: FleetScenario
    load: LoadSection


def planned_rows(study: SweepStudy) -> Iterator[PlannedRow]:
    """The rows in their order. Raises ValueError where values do not agree, such as choices and boxes."""
    cells: Mapping[str, SweepCell] = study.cells or {"": SweepCell(study.fleet, study.load)}
    for axes in study.sweeps:
        names, values = zip(*axes.stated(), strict=True)
        for (cell, stated), combination in product(cells.items(), product(*values)):
            chosen = dict(zip(names, combination, strict=True))
            load = replace(stated.load, rate_per_box=chosen.get("rate_per_box", stated.load.rate_per_box))
            label = {key: value.name if isinstance(value, Enum) else value for key, value in chosen.items()}
            yield PlannedRow(
                {**({"cell": cell} if cell else {}), **label},
                _scenario(stated.fleet, chosen, load.seconds),
                load,
            )


def _scenario(fleet: FleetSection, chosen: Mapping[str, Any], seconds: float) -> FleetScenario:
    third = seconds / 3
    changes: dict[str, Any] = {name: chosen[name] for name in _SCENARIO_FIELDS if name in chosen}
    if (period := chosen.get("period")) is not None:
        changes["report_period"] = period
    if count := chosen.get("boxes_down", 0):
        if count > fleet.boxes:
            raise ValueError(f"boxes_down={count}: should be at most boxes={fleet.boxes}")
        changes["down"] = tuple((at * fleet.boxes // count, third, 2 * third) for at in range(count))
    if chosen.get("router_lost"):
        changes["router_down"] = (_LOST_ROUTER, third, 2 * third)
    return replace(fleet.scenario(), **changes)


def sweep(study: SweepStudy, data: Path) -> dict[str, Any]:
    """All rows of a study, each the means over its seeds. Raises BadInput."""
    try:
        rows = list(planned_rows(study))
    except ValueError as error:
        raise BadInput(f"{study.name}: {error}") from error
    return {
        "study": study.name.removeprefix("fleet-"),
        "boxes": [study.fleet.boxes],
        "rate_per_box": study.load.rate_per_box,
        "rate_per_box_by_cell": {name: cell.load.rate_per_box for name, cell in study.cells.items()},
        "seconds": study.load.seconds,
        "warm_up": study.load.warm_up,
        "seeds": list(study.seeds),
        "rows": [{**row.label, **_means(row, study.seeds, data)} for row in rows],
    }


def _means(row: PlannedRow, seeds: tuple[int, ...], data: Path) -> dict[str, float]:
    """Means over the seeds, and the range of the share that met its objectives.

    Where prompts share tokens with earlier ones, `cached_percent` of these were found in a cache, by served
    requests.
    """
    found = []
    for seed in seeds:
        workload = _workload(row.load, row.scenario.boxes, seed, data)
        result = simulate_fleet(replace(row.scenario, seed=seed), workload)
        found.append(figures(result.of(workload.at >= row.load.warm_up)))
        counted = (workload.at >= row.load.warm_up) & ~np.isnan(result.ttft)
        if shared := int(workload.shared[counted].sum()):
            found[-1]["cached_percent"] = 100 * int(result.cached[counted].sum()) / shared
    met = [each["met_percent"] for each in found]
    means = {name: round(fmean(each[name] for each in found), 2) for name in found[0]}
    return {**means, "met_spread": round(max(met) - min(met), 2)}


def _workload(load: LoadSection, boxes: int, seed: int, data: Path) -> FleetWorkload:
    """The requests of one seed. Raises BadInput if a recorded stream cannot be read."""
    rate = load.rate_per_box * boxes
    if load.conversations is not None:
        return FleetWorkload.conversations(rate, load.seconds, seed, **asdict(load.conversations))
    if load.streams is None:
        return FleetWorkload.drawn(rate, load.seconds, seed, **asdict(load.drawn))
    planned = plan_requests(load.streams, rate=rate, seed=seed, warmup=0.0, measured=load.seconds, data=data)
    numbers: dict[str, int] = {"": -1}
    groups = [numbers.setdefault(each.prefix_group, len(numbers) - 1) for each in planned]
    at = np.array([each.at for each in planned], np.float64)
    columns = ([getattr(each, name) for each in planned] for name in ("prompt_tokens", "output_tokens"))
    prompt, output = (np.array(column, np.int32) for column in columns)
    shared = np.array([each.prefix_tokens for each in planned], np.int32)
    named = shared if load.names_prefixes else np.zeros_like(shared)
    return FleetWorkload(at, prompt, output, np.array(groups, np.int32), shared, named)


def figures(found: FleetResult | FleetTotals) -> dict[str, float]:
    """What came of the requests."""
    return {
        "met_percent": round(100 * found.attainment, 3),
        "rejected_percent": round(100 * found.share(FleetOutcome.REJECTED), 3),
        "lost_percent": round(100 * found.share(FleetOutcome.LOST), 3),
        "ttft_p50_ms": round(1e3 * found.ttft_quantile(0.5), 2),
        "ttft_p99_ms": round(1e3 * found.ttft_quantile(0.99), 2),
    }
