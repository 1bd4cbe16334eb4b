"""Studies of routing on simulated fleets: staleness, policies, lost boxes, and the rate that a fleet carries.

    python -m benchmark_control_plane.experiments.fleet.routing_policies STUDY [--boxes N] [--seconds S]
        [--rate R] [--seeds 1 2 3] [--results FILE]

- `staleness`: policies that use reports, at several periods of reports and numbers of routers.
- `policies`: all policies, on equal and unequal boxes, with shared prefixes, bursts, and above capacity.
- `faults`: a twentieth of the boxes dies for a third of the time.
- `capacity`: for each number of boxes, the rate per box at which 90 % of the requests meet their objectives.
- `scale`: one run of `--boxes` boxes: events per second and memory.

Boxes have the step time of `BoxModel`, reasoned for a model of 8 billion parameters on one GPU and not
measured, and a TTFT objective of 0.5 s.
"""

import argparse
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from benchmark_control_plane.common.command_line import BadInput, print_json
from benchmark_control_plane.common.results_file import add_results, write_json
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import (
    Fate,
    FleetResult,
    FleetScenario,
    FleetWorkload,
    RoutingPolicy,
)

_PERIODS = (0.05, 0.2, 0.5, 1.0, 5.0)
_ROUTERS = (1, 4, 16)
_BY_REPORTS = (RoutingPolicy.TANDEM, RoutingPolicy.TANDEM_REPORT_ONLY, RoutingPolicy.BEST_OF_ALL)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add_results(parser)
    options = parser.parse_args(arguments)

    def command() -> dict[str, object]:
        if min(options.rate, options.seconds, *options.boxes) <= 0:
            raise BadInput("--rate, --seconds and --boxes: must be above 0")
        simulate_fleet(FleetScenario(2), FleetWorkload.drawn(4, 1, 1))
        found: dict[str, object] = {
            "study": options.study,
            "boxes": options.boxes,
            "rate_per_box": options.rate,
            "seconds": options.seconds,
            "seeds": options.seeds,
            "rows": list(_STUDIES[options.study](options)),
        }
        if options.results is not None:
            write_json(options.results, found)
        return found

    return print_json(command)


def _staleness(options: argparse.Namespace) -> Iterable[Row]:
    boxes = options.boxes[0]
    fresh = FleetScenario(boxes, routers=1, report_period=0.01, ttft=_TTFT)
    yield {"policy": "TANDEM", "period": 0.01, "routers": 1, **_mean(fresh, options)}
    yield {"policy": "RANDOM", **_mean(fresh.with_policy(RoutingPolicy.RANDOM), options)}
    for period, routers, policy in product(_PERIODS, _ROUTERS, _BY_REPORTS):
        scenario = FleetScenario(boxes, policy=policy, routers=routers, report_period=period, ttft=_TTFT)
        yield {"policy": policy.name, "period": period, "routers": routers, **_mean(scenario, options)}


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
        workload = FleetWorkload.drawn(options.rate * boxes, options.seconds, options.seeds[0])
        scenario = FleetScenario(boxes, routers=16, ttft=_TTFT)
        found = simulate_fleet(scenario, workload)
        yield {
            "boxes": boxes,
            "requests": len(workload),
            "events": found.events,
            "wall_seconds": round(found.seconds, 2),
            "events_per_second": round(found.events / found.seconds),
            "box_seconds_per_second": round(boxes * options.seconds / found.seconds),
            "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024),
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
        rows.append(_figures(simulate_fleet(replace(scenario, seed=seed), workload)))
    means = {name: round(fmean(row[name] for row in rows), 2) for name in rows[0]}
    spread = max(row["met_percent"] for row in rows) - min(row["met_percent"] for row in rows)
    return {**means, "met_spread": round(spread, 2)}


def _figures(found: FleetResult) -> dict[str, float]:
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
    "faults": _faults,
    "capacity": _capacity,
    "scale": _scale,
}


if __name__ == "__main__":
    raise SystemExit(main())
