"""Compares the event model of a fleet with the gate-exact simulation, on a few boxes.

Cells are numbers of boxes, loads and policies; both simulations get the same requests and draws. The
targets are 2 points of attainment and 5 and 10 % of the TTFT's median and 0.99 quantile.
"""

from itertools import combinations, product
from typing import Any

from benchmark_control_plane.fleet_studies.study_file import AccuracyStudy
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.oracle import simulate_exactly
from benchmark_control_plane.simulator.cluster.scenario import (
    FleetOutcome,
    FleetResult,
    FleetScenario,
    FleetWorkload,
)

# Differences of attainment below this are not counted as an order.
_TIE = 0.002
_ROUTERS = 2


def oracle_accuracy(study: AccuracyStudy) -> dict[str, Any]:
    """A cell for each number of boxes, rate and policy, and how often both order two policies alike."""
    sections = {"scheduling": {"ordering": study.ordering, "priority_head_start_ms": 0}}
    cells = []
    for boxes, rate, policy in product(study.cells.boxes, study.cells.rates, study.cells.policies):
        workload = FleetWorkload.drawn(boxes * rate, study.seconds, study.seeds[0])
        scenario = FleetScenario(boxes, policy=policy, routers=_ROUTERS, ttft=study.ttft_ms / 1_000)
        cells.append(_cell(scenario, workload, rate, sections))
    return {"ordering": study.ordering, "cells": cells, "order": _order(cells)}


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
        "rejected": round(result.share(FleetOutcome.REJECTED), 4),
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
