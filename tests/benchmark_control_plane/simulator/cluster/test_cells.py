"""A fleet of cells: the same run in any number of processes, and the totals of its cells."""

from dataclasses import replace

import numpy as np
import pytest

from benchmark_control_plane.simulator.cluster.cells import simulate_cells
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import FleetOutcome, FleetScenario, FleetWorkload

pytestmark = pytest.mark.long

CELL = FleetScenario(4, routers=2, ttft=0.5)


def test_a_run_depends_on_the_seed_and_not_on_the_number_of_processes() -> None:
    one, two = (
        simulate_cells(CELL, 3, rate=120, seconds=4, seed=7, processes=processes) for processes in (1, 2)
    )
    assert one.trace_hash == two.trace_hash
    assert (one.events, one.requests) == (two.events, two.requests)
    other = simulate_cells(CELL, 3, rate=120, seconds=4, seed=8, processes=1)
    assert other.trace_hash != one.trace_hash


def test_totals_are_those_of_the_cells() -> None:
    found = simulate_cells(CELL, 2, rate=160, seconds=5, seed=7, processes=1)
    cells = [
        simulate_fleet(replace(CELL, seed=(7 << 20) + cell), FleetWorkload.drawn(160, 5, (7, cell)))
        for cell in range(2)
    ]
    assert found.requests == 1_600
    assert found.events == sum(cell.events for cell in cells)
    for outcome in FleetOutcome:
        assert found.share(outcome) == pytest.approx(np.mean([cell.share(outcome) for cell in cells]))
    assert found.attainment == found.share(FleetOutcome.MET)
    ttft = np.concatenate([cell.ttft for cell in cells])
    for level in (0.5, 0.99):
        exact = np.quantile(ttft[~np.isnan(ttft)], level, method="inverted_cdf")
        assert exact <= found.ttft_quantile(level) <= 1.006 * exact
