"""Finds the rate per box that fleets of several sizes carry, and what routing and reports cost them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from benchmark_control_plane.fleet_studies.study_file import CapacityStudy
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import FleetScenario, FleetWorkload, RoutingPolicy

_REPORT_BYTES = 340
_FRESH_S = 0.01
_FIRST_GUESS, _LEAST = 28.0, 0.1
_STEP = 1.05


def fleet_capacity(study: CapacityStudy) -> dict[str, Any]:
    """A row for each number of boxes and policy."""
    return {
        "study": "capacity",
        "boxes": list(study.boxes),
        "warm_up": study.warm_up,
        "seconds": study.seconds,
        "requests": study.requests,
        "seeds": list(study.seeds),
        "rows": list(_rows(study)),
    }


def _rows(study: CapacityStudy) -> Iterator[dict[str, Any]]:
    guess = _FIRST_GUESS
    for boxes, policy in product(study.boxes, study.policies):
        begin = time.process_time()
        scenario = FleetScenario(boxes, policy=policy, ttft=study.ttft_ms / 1_000)
        found = [_found(study, scenario, seed, guess) for seed in study.seeds]
        rates = [rate for rate, _ in found]
        guess = fmean(rates) or _FIRST_GUESS
        yield {
            "boxes": boxes,
            "policy": policy.name,
            "rate_per_box": round(fmean(rates), 2),
            "rate_spread": round(max(rates) - min(rates), 2),
            "lost_to_routing_points": round(100 * fmean(lost for _, lost in found), 2),
            "report_bytes_per_second": round(
                _REPORT_BYTES * boxes * scenario.routers / scenario.report_period
            ),
            "cpu_seconds": round(time.process_time() - begin, 1),
        }


def _found(study: CapacityStudy, scenario: FleetScenario, seed: int, guess: float) -> tuple[float, float]:
    """The rate that is kept, and the share of requests that one router with fresh reports saves there."""
    known: dict[float, float] = {}

    def met(rate: float) -> float:
        known[rate] = _met(study, scenario, seed, rate)
        return known[rate]

    rate = rate_kept(met, study.kept, guess)
    nearest = min(known, key=lambda tried: abs(tried - rate))
    informed = replace(scenario, policy=RoutingPolicy.TANDEM, routers=1, report_period=_FRESH_S)
    return rate, _met(study, informed, seed, nearest) - known[nearest]


def _met(study: CapacityStudy, scenario: FleetScenario, seed: int, rate: float) -> float:
    """Share of the requests after the warm-up that met their objectives."""
    total = rate * scenario.boxes
    seconds = max(study.seconds, study.warm_up + study.requests / total)
    workload = FleetWorkload.drawn(total, seconds, seed)
    result = simulate_fleet(replace(scenario, seed=seed), workload)
    return result.of(workload.at >= study.warm_up).attainment


def rate_kept(met: Callable[[float], float], kept: float, guess: float) -> float:
    """The rate at which `met` falls below `kept`, on the line between two rates that are 5 % apart.

    It takes two runs where the guess is near, so that a large fleet begins with the rate of a smaller one.
    Returns 0 if no rate from 0.1 on is kept.
    """
    rate, share = guess, met(guess)
    while rate >= _LEAST:
        following = rate * _STEP if share >= kept else rate / _STEP
        next_share = met(following)
        if (next_share >= kept) != (share >= kept):
            return rate + (following - rate) * (share - kept) / (share - next_share)
        rate, share = following, next_share
    return 0.0
