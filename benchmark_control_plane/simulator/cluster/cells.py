"""Simulates a large fleet as cells: each has its own boxes, routers and arrivals, and shares nothing.

Whatever sends a request to a cell (DNS, anycast, a first gateway) knows no loads, so the arrivals of each
cell are a Poisson process of their own. Cells run in several processes; the result depends on the seed only.
"""

import hashlib
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import (
    FleetOutcome,
    FleetScenario,
    FleetWorkload,
    Floats,
    Ints,
)

_FIRST_S, _LAST_S, _BINS = 1e-4, 1e4, 4_096
_BIN = np.log(_LAST_S / _FIRST_S) / _BINS


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """Totals over requests, which are too many to keep.

    Attributes:
        outcomes: number of requests by `FleetOutcome`.
        ttft: number of first tokens by bin of their TTFT; the edges of a bin are 0.5 % apart.
        trace_hash: SHA-256 over the hashes of the cells; equal hashes mean equal runs.
        cpu_seconds: of all processes, with the drawing of the arrivals.
    """

    outcomes: Ints
    ttft: Ints
    events: int
    trace_hash: str
    cpu_seconds: float

    @property
    def requests(self) -> int:
        """Number of all requests."""
        return int(self.outcomes.sum())

    @property
    def attainment(self) -> float:
        """Share of all requests that met their objectives."""
        return self.share(FleetOutcome.MET)

    def share(self, outcome: FleetOutcome) -> float:
        """Share of all requests with this outcome."""
        return float(self.outcomes[outcome] / self.requests)

    def ttft_quantile(self, level: float) -> float:
        """Quantile of the TTFT of requests that had a first token, in seconds, at most 0.5 % too large."""
        reached = np.searchsorted(np.cumsum(self.ttft), level * self.ttft.sum())
        return float(_FIRST_S * np.exp(_BIN * (reached + 1)))


def simulate_cells(
    cell: FleetScenario,
    cells: int,
    *,
    rate: float,
    seconds: float,
    seed: int,
    processes: int,
) -> FleetTotals:
    """Runs `cells` fleets like `cell`, until every request has ended.

    Args:
        cell: boxes and routers of one cell; its seed is replaced.
        cells: number of cells.
        rate: requests per second of one cell.
        seconds: time of the last arrival.
        seed: of arrivals and draws.
        processes: cells that run at the same time.
    """
    one = partial(_simulate_cell, cell, rate, seconds, seed)
    if processes == 1:
        return _together([one(number) for number in range(cells)])
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return _together(list(pool.map(one, range(cells))))


def _simulate_cell(cell: FleetScenario, rate: float, seconds: float, seed: int, number: int) -> FleetTotals:
    begin = time.process_time()
    workload = FleetWorkload.drawn(rate, seconds, (seed, number))
    # A draw is a hash of the seed and the request, so cells need seeds of their own.
    found = simulate_fleet(replace(cell, seed=(seed << 20) + number), workload)
    return FleetTotals(
        np.bincount(found.outcome, minlength=len(FleetOutcome)),
        _binned(found.ttft[~np.isnan(found.ttft)].astype(np.float64)),
        found.events,
        found.trace_hash,
        time.process_time() - begin,
    )


def _binned(ttft: Floats) -> Ints:
    bins = np.floor(np.log(ttft / _FIRST_S) / _BIN)
    return np.bincount(np.clip(bins, 0, _BINS - 1).astype(np.int64), minlength=_BINS)


def _together(found: list[FleetTotals]) -> FleetTotals:
    hashes = "".join(each.trace_hash for each in found)
    return FleetTotals(
        np.sum([each.outcomes for each in found], axis=0),
        np.sum([each.ttft for each in found], axis=0),
        sum(each.events for each in found),
        hashlib.sha256(hashes.encode()).hexdigest(),
        sum(each.cpu_seconds for each in found),
    )
