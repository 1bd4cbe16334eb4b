"""Compares the event model of a fleet with the gate-exact simulation, on a few boxes.

Cells are numbers of boxes, loads and policies; both simulations get the same requests, draws and faults. The
targets are 2 points of attainment and 5 and 10 % of the TTFT's median and 0.99 quantile.

    python -m benchmark_control_plane.fleet_studies.oracle_accuracy [--boxes 1 2 4] [--seconds 30]
        [--ordering fcfs] [--results FILE]
"""

import argparse
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.oracle import simulate_exactly
from benchmark_control_plane.simulator.cluster.scenario import (
    Fate,
    FleetResult,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)

_POLICIES = (
    RoutingPolicy.TANDEM,
    RoutingPolicy.LEAST_CONNECTIONS,
    RoutingPolicy.RANDOM,
    RoutingPolicy.ROUND_ROBIN,
    RoutingPolicy.BEST_OF_ALL,
)
# Differences of attainment below this are not counted as an order.
_TIE = 0.002


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boxes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[16.0, 22.0, 26.0], help="requests/s per box"
    )
    parser.add_argument(
        "--policies", nargs="+", default=["TANDEM"], choices=[each.name for each in _POLICIES]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ttft", type=float, default=0.5, help="objective in seconds")
    parser.add_argument("--ordering", default="fcfs", help="scheduling.ordering of the boxes")
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if options.seconds <= 0 or min(options.rates) <= 0:
            raise BadInput(f"--seconds {options.seconds}, --rates {options.rates}: must be above 0")
        sections = {"scheduling": {"ordering": options.ordering, "priority_head_start_ms": 0}}
        cells = []
        for boxes, rate, name in product(options.boxes, options.rates, options.policies):
            workload = FleetWorkload.drawn(boxes * rate, options.seconds, options.seed)
            scenario = FleetScenario(boxes, policy=RoutingPolicy[name], routers=2, ttft=options.ttft)
            cells.append(_cell(scenario, workload, rate, sections))
        found: dict[str, object] = {"ordering": options.ordering, "cells": cells, "order": _order(cells)}
        if options.results is not None:
            write_json(options.results, found)
        return found

    return print_json(command)


def _cell(
    scenario: FleetScenario, workload: FleetWorkload, rate: float, sections: dict[str, Any]
) -> dict[str, Any]:
    exact, fast = simulate_exactly(scenario, workload, sections), simulate_fleet(scenario, workload)
    return {
        "boxes": scenario.boxes,
        "rate_per_box": rate,
        "policy": scenario.policy.name,
        "requests": len(workload),
        "exact": _figures(exact),
        "model": _figures(fast),
        "attainment_points": round(100 * (fast.attainment - exact.attainment), 2),
        "ttft_p50_percent": _percent(fast, exact, 0.5),
        "ttft_p99_percent": _percent(fast, exact, 0.99),
    }


def _figures(result: FleetResult) -> dict[str, float]:
    return {
        "attainment": round(result.attainment, 4),
        "rejected": round(result.share(Fate.REJECTED), 4),
        "ttft_p50_ms": round(1e3 * result.ttft_quantile(0.5), 1),
        "ttft_p99_ms": round(1e3 * result.ttft_quantile(0.99), 1),
        "seconds": round(result.seconds, 2),
    }


def _percent(fast: FleetResult, exact: FleetResult, level: float) -> float:
    return round(100 * (fast.ttft_quantile(level) / exact.ttft_quantile(level) - 1), 1)


def _order(cells: list[dict[str, Any]]) -> dict[str, int]:
    """Pairs of policies in one cell that both simulations put in the same order, and all pairs."""
    same = pairs = 0
    for one, two in combinations(cells, 2):
        if (one["boxes"], one["rate_per_box"]) != (two["boxes"], two["rate_per_box"]):
            continue
        differences = [one[kind]["attainment"] - two[kind]["attainment"] for kind in ("exact", "model")]
        if abs(differences[0]) < _TIE:
            continue
        pairs += 1
        same += differences[0] * differences[1] > 0
    return {"pairs": pairs, "same_order": same}


if __name__ == "__main__":
    raise SystemExit(main())
