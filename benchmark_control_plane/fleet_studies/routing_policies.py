"""Studies of routing on simulated fleets: staleness, policies, lost boxes, and the rate that a fleet carries.

    python -m benchmark_control_plane.fleet_studies.routing_policies STUDY [--boxes N] [--seconds S]
        [--warm-up S] [--rate R] [--seeds 1 2 3] [--results FILE]

- `staleness`: policies that use reports, at several periods of reports; and those that do not.
- `policies`: all policies, on equal and unequal boxes, with shared prefixes, bursts, and above capacity.
- `choices`: Tandem's policy with 2, 4, 8 and all boxes compared, at several periods of reports.
- `retries`: Tandem's policy with and without a second try after a refusal, at the rate and 130 % of it.
- `faults`: a twentieth of the boxes dies for a third of the time.
- `router-lost`: one of four routers is down for a third of the time.
- `capacity`: for each number of boxes, the rate per box at which 90 % of the requests meet their objectives.
- `scale`: one run of `--boxes` boxes, as one fleet or in `--cells`: events per second and memory.

Requests that arrive within `--warm-up` seconds load the boxes and are not counted, except by `capacity` and
`scale`.

Boxes have the step time of `BoxModel`, reasoned for a model of 8 billion parameters on one GPU and not
measured, and a TTFT objective of 0.5 s.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.simulator.cluster.cells import FleetTotals, simulate_cells
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import (
    Fate,
    FleetResult,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)

_PERIODS = (0.01, 0.2, 1.0, 5.0)
_CHOICES = (2, 4, 8)
_BY_REPORTS = (RoutingPolicy.TANDEM, RoutingPolicy.TANDEM_REPORT_ONLY, RoutingPolicy.BEST_OF_ALL)
_WITHOUT_REPORTS = (
    RoutingPolicy.ROUND_ROBIN,
    RoutingPolicy.LEAST_CONNECTIONS,
    RoutingPolicy.RANDOM,
    RoutingPolicy.PREFIX_STICKY,
)
_COMPARED = tuple(each for each in RoutingPolicy if each is not RoutingPolicy.TANDEM_REPORT_ONLY)
_TTFT = 0.5
_REPORT_BYTES = 340
_KEPT = 0.9
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", choices=_STUDIES)
    parser.add_argument("--boxes", type=int, nargs="+", default=[64])
    parser.add_argument("--rate", type=float, default=24.0, help="requests per second and box")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds that are not counted")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cells", type=int, default=1, help="of the study scale, each with its own routers")
    parser.add_argument("--routers", type=int, default=16, help="of the study scale, of each cell")
    parser.add_argument("--processes", type=int, default=1, help="of the study scale, with several cells")
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        counts = (options.cells, options.routers, options.processes)
        if min(options.rate, options.seconds - options.warm_up, *options.boxes, *counts) <= 0:
            raise BadInput("all numbers must be above 0, and --warm-up below --seconds")
        if any(boxes % options.cells for boxes in options.boxes):
            raise BadInput(f"--cells {options.cells}: does not divide --boxes")
        simulate_fleet(FleetScenario(2), FleetWorkload.drawn(4, 1, 1))
        found: dict[str, object] = {
            "study": options.study,
            "boxes": options.boxes,
            "rate_per_box": options.rate,
            "seconds": options.seconds,
            "warm_up": options.warm_up,
            "seeds": options.seeds,
            "rows": list(_STUDIES[options.study](options)),
        }
        if options.results is not None:
            write_json(options.results, found)
        return found

    return print_json(command)


def _staleness(options: argparse.Namespace) -> Iterable[Row]:
    fleet = FleetScenario(options.boxes[0], ttft=_TTFT)
    for policy, period in product(_BY_REPORTS, _PERIODS):
        scenario = replace(fleet, policy=policy, report_period=period)
        yield {"policy": policy.name, "period": period, **_mean(scenario, options)}
    for policy in _WITHOUT_REPORTS:
        yield {"policy": policy.name, "period": None, **_mean(fleet.with_policy(policy), options)}


def _choices(options: argparse.Namespace) -> Iterable[Row]:
    boxes = options.boxes[0]
    for choices, period in product((*_CHOICES, boxes), _PERIODS):
        scenario = FleetScenario(boxes, choices=choices, report_period=period, ttft=_TTFT)
        yield {"choices": choices, "period": period, **_mean(scenario, options)}


def _retries(options: argparse.Namespace) -> Iterable[Row]:
    for factor, retries in product((1.0, 1.3), (True, False)):
        scenario = FleetScenario(options.boxes[0], retries=retries, ttft=_TTFT)
        rate = round(options.rate * factor, 2)
        yield {"rate_per_box": rate, "retries": retries, **_mean(scenario, options, factor=factor)}


def _router_lost(options: argparse.Namespace) -> Iterable[Row]:
    third = options.seconds / 3
    fleet = FleetScenario(options.boxes[0], ttft=_TTFT)
    for policy, down in product(_COMPARED, (None, (1, third, 2 * third))):
        scenario = replace(fleet, policy=policy, router_down=down)
        yield {"policy": policy.name, "router_lost": down is not None, **_mean(scenario, options)}


def _policies(options: argparse.Namespace) -> Iterable[Row]:
    boxes = options.boxes[0]
    equal = FleetScenario(boxes, ttft=_TTFT)
    speeds = tuple((0.5, 1.0, 1.5)[at % 3] for at in range(boxes))
    cells: dict[str, tuple[FleetScenario, float, dict[str, Any]]] = {
        "equal boxes": (equal, 1.0, {}),
        "70 % of the rate": (equal, 0.7, {}),
        "speeds 0.5, 1, 1.5": (replace(equal, speeds=speeds), 1.0, {}),
        "shared prefixes": (
            equal,
            1.0,
            {"groups": 20 * boxes, "shared_tokens": 1_024, "median_prompt": 200.0},
        ),
        "bursts of 2 s at twice the rate": (equal, 0.8, {"burst": 2.0}),
        "130 % of the rate": (equal, 1.3, {}),
    }
    for (name, (scenario, factor, load)), policy in product(cells.items(), _COMPARED):
        yield {
            "cell": name,
            "policy": policy.name,
            **_mean(scenario.with_policy(policy), options, factor=factor, load=load),
        }


def _faults(options: argparse.Namespace) -> Iterable[Row]:
    boxes, third = options.boxes[0], options.seconds / 3
    down = tuple((box, third, 2 * third) for box in range(0, boxes, 20))
    for policy in _COMPARED:
        scenario = FleetScenario(boxes, policy=policy, ttft=_TTFT, down=down)
        yield {"policy": policy.name, "boxes_down": len(down), **_mean(scenario, options, factor=0.9)}


def _capacity(options: argparse.Namespace) -> Iterable[Row]:
    for boxes, policy in product(options.boxes, (RoutingPolicy.TANDEM, RoutingPolicy.RANDOM)):
        scenario = FleetScenario(boxes, policy=policy, ttft=_TTFT)
        rate = _rate_at(scenario, options)
        reports = _REPORT_BYTES * boxes * scenario.routers / scenario.report_period
        yield {
            "boxes": boxes,
            "policy": policy.name,
            "rate_per_box": round(rate, 2),
            "report_bytes_per_second": round(reports),
        }


def _rate_at(scenario: FleetScenario, options: argparse.Namespace) -> float:
    """The highest rate per box at which `_KEPT` of the requests meet their objectives, to 1 %."""
    low, high = 1.0, 100.0
    # At least 2,000 requests, so that a fleet of one box has a figure.
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        seconds = max(options.seconds, 2_000 / (scenario.boxes * middle))
        kept = fmean(
            simulate_fleet(scenario, FleetWorkload.drawn(middle * scenario.boxes, seconds, seed)).attainment
            for seed in options.seeds
        )
        low, high = (middle, high) if kept >= _KEPT else (low, middle)
    return low


def _scale(options: argparse.Namespace) -> Iterable[Row]:
    for boxes in options.boxes:
        in_cell = boxes // options.cells
        begin = time.perf_counter()
        found = simulate_cells(
            FleetScenario(in_cell, routers=options.routers, ttft=_TTFT),
            options.cells,
            rate=options.rate * in_cell,
            seconds=options.seconds,
            seed=options.seeds[0],
            processes=options.processes,
        )
        own, of_one = (
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        yield {
            "boxes": boxes,
            "seconds": options.seconds,
            "cells": options.cells,
            "routers_per_cell": options.routers,
            "processes": options.processes,
            "requests": found.requests,
            "events": found.events,
            "wall_seconds": round(time.perf_counter() - begin, 2),
            "cpu_seconds": round(found.cpu_seconds, 2),
            "events_per_cpu_second": round(found.events / found.cpu_seconds),
            "box_seconds_per_cpu_second": round(boxes * options.seconds / found.cpu_seconds),
            # Of the largest child, times their number.
            "peak_memory_mib": round((own + (options.processes > 1) * options.processes * of_one) / 1_024),
            "hash": found.trace_hash[:16],
            **_figures(found),
        }


def _mean(
    scenario: FleetScenario,
    options: argparse.Namespace,
    *,
    factor: float = 1.0,
    load: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Means over the seeds."""
    rate = options.rate * scenario.boxes * factor
    rows = []
    for seed in options.seeds:
        workload = FleetWorkload.drawn(rate, options.seconds, seed, **(load or {}))
        found = simulate_fleet(replace(scenario, seed=seed), workload)
        rows.append(_figures(found.of(workload.at >= options.warm_up)))
    means = {name: round(fmean(row[name] for row in rows), 2) for name in rows[0]}
    spread = max(row["met_percent"] for row in rows) - min(row["met_percent"] for row in rows)
    return {**means, "met_spread": round(spread, 2)}


def _figures(found: FleetResult | FleetTotals) -> dict[str, float]:
    return {
        "met_percent": round(100 * found.attainment, 3),
        "rejected_percent": round(100 * found.share(Fate.REJECTED), 3),
        "lost_percent": round(100 * found.share(Fate.LOST), 3),
        "ttft_p50_ms": round(1e3 * found.ttft_quantile(0.5), 2),
        "ttft_p99_ms": round(1e3 * found.ttft_quantile(0.99), 2),
    }


_STUDIES: Mapping[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
    "staleness": _staleness,
    "policies": _policies,
    "choices": _choices,
    "retries": _retries,
    "faults": _faults,
    "router-lost": _router_lost,
    "capacity": _capacity,
    "scale": _scale,
}


if __name__ == "__main__":
    raise SystemExit(main())
