"""Lets the rejected clients of a burst come back, and measures the load and the harm that they make.

Boxes, their Retry-After and the routers are those that are served (`simulator.cluster.oracle`). A request
that comes back is a new one with the same objectives. A storm would be a second after the burst with more
tries than the fleet carries, and requests that arrive then and are rejected.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.fleet_studies.client_sections import RejectedClient, StormStudy
from benchmark_control_plane.fleet_studies.joined_workloads import joined
from benchmark_control_plane.simulator.cluster.oracle import ExactResult, FleetClients, simulate_exactly
from benchmark_control_plane.simulator.cluster.scenario import FleetOutcome, FleetWorkload

_WAITS: Mapping[RejectedClient, Callable[[float], float]] = {
    RejectedClient.LEAVES: float,
    RejectedClient.MILLISECONDS: lambda stated: ceil(1e3 * stated) / 1e3,
    RejectedClient.WHOLE_SECONDS: lambda stated: float(ceil(stated)),
    RejectedClient.ONE_SECOND: lambda stated: 1.0,
}
_CALM = 0.1
"""A second is calm if at most this share of its tries is rejected."""


def retry_storms(study: StormStudy) -> dict[str, Any]:
    """A row for each kind of client, with and without second tries by routers; means over the seeds."""
    rows = [_row(study, client, retries=retries) for retries, client in product(study.retries, study.clients)]
    burst = study.burst
    return {
        "study": study.name.removeprefix("fleet-"),
        "boxes": [study.fleet.boxes],
        "rate_per_box": study.rate_per_box,
        "burst": {"at": burst.at, "seconds": burst.seconds, "rate_per_box": burst.rate_per_box},
        "seconds": study.seconds,
        "tries": study.tries,
        "seeds": list(study.seeds),
        "rows": rows,
    }


def _row(study: StormStudy, client: RejectedClient, *, retries: bool) -> dict[str, Any]:
    tries = 1 if client is RejectedClient.LEAVES else study.tries
    clients = FleetClients(tries=tries, wait=_WAITS[client])
    found = []
    for seed in study.seeds:
        workload, is_burst = _workload(study, seed)
        scenario = replace(study.fleet.scenario(), seed=seed, retries=retries)
        result = simulate_exactly(scenario, workload, clients=clients)
        found.append(storm_figures(study, result, workload, is_burst))
    return {
        "clients": str(client),
        "retries": retries,
        **{name: round(fmean(each[name] for each in found), 2) for name in found[0]},
    }


def _workload(study: StormStudy, seed: int) -> tuple[FleetWorkload, npt.NDArray[np.bool_]]:
    """The requests of one seed, and which of them are the burst's."""
    boxes, burst = study.fleet.boxes, study.burst
    calm = FleetWorkload.drawn(study.rate_per_box * boxes, study.seconds, (seed, 0))
    added = FleetWorkload.drawn(burst.rate_per_box * boxes, burst.seconds, (seed, 1))
    workload, part = joined(calm, replace(added, at=added.at + burst.at))
    return workload, part == 1


def storm_figures(
    study: StormStudy, found: ExactResult, workload: FleetWorkload, is_burst: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Figures of one run.

    `burst_met_percent` are the requests of the burst that met their objectives in some try;
    `later_met_percent` those that arrived after it and met them at the first try. `most_tries_per_s` is of
    the fullest second after the burst, per box, and `calm_after_s` the time until all later seconds are calm.
    """
    end = study.burst.at + study.burst.seconds
    first: dict[int, FleetOutcome] = {}
    for one in sorted(found.tries):
        first.setdefault(one.number, one.outcome)
    met_first = np.array([first[at] is FleetOutcome.MET for at in range(len(workload))])
    is_later = (workload.at >= end) & ~is_burst
    later = [one for one in found.tries if end <= one.at < study.seconds]
    seconds = np.array([int(one.at - end) for one in later], np.int64)
    rejected = np.array([one.outcome is FleetOutcome.REJECTED for one in later], np.float64)
    tries = np.bincount(seconds, minlength=1)
    refused = np.bincount(seconds, rejected, minlength=1)
    rough = np.flatnonzero(refused > _CALM * tries)
    return {
        "burst_met_percent": 100 * float(np.mean(found.outcome[is_burst] == FleetOutcome.MET)),
        "later_met_percent": 100 * float(np.mean(met_first[is_later])),
        "tries_per_request": len(found.tries) / len(workload),
        "most_tries_per_s": float(tries.max()) / study.fleet.boxes,
        "calm_after_s": float(rough[-1] + 1) if len(rough) else 0.0,
        "second_tries_percent": 100 * found.retries / len(found.tries),
    }
