"""Measures the time and the memory in which fleets of up to 10,000 boxes are simulated."""

import resource
import time
from typing import Any

from benchmark_control_plane.fleet_studies.study_file import ScaleRun, ScaleStudy
from benchmark_control_plane.fleet_studies.sweeps import figures
from benchmark_control_plane.simulator.cluster.cells import simulate_cells
from benchmark_control_plane.simulator.cluster.event_model import simulate_fleet
from benchmark_control_plane.simulator.cluster.scenario import FleetScenario, FleetWorkload


def fleet_scale(study: ScaleStudy) -> dict[str, Any]:
    """A row for each run; the peak memory is that of all runs so far."""
    # Compiles the event model.
    simulate_fleet(FleetScenario(2), FleetWorkload.drawn(4, 1, 1))
    return {
        "study": "scale",
        "rate_per_box": study.rate_per_box,
        "seed": study.seeds[0],
        "rows": [_row(study, run) for run in study.runs],
    }


def _row(study: ScaleStudy, run: ScaleRun) -> dict[str, Any]:
    begin, in_cell = time.perf_counter(), run.boxes // run.cells
    found = simulate_cells(
        FleetScenario(in_cell, routers=run.routers, ttft=study.ttft_ms / 1_000),
        run.cells,
        rate=study.rate_per_box * in_cell,
        seconds=run.seconds,
        seed=study.seeds[0],
        processes=run.processes,
    )
    own, of_one = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "boxes": run.boxes,
        "seconds": run.seconds,
        "cells": run.cells,
        "routers_per_cell": run.routers,
        "processes": run.processes,
        "requests": found.requests,
        "events": found.events,
        "wall_seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(found.cpu_seconds, 2),
        "events_per_cpu_second": round(found.events / found.cpu_seconds),
        "box_seconds_per_cpu_second": round(run.boxes * run.seconds / found.cpu_seconds),
        # Of the largest child, times their number.
        "peak_memory_mib": round((own + (run.processes > 1) * run.processes * of_one) / 1_024),
        "hash": found.trace_hash[:16],
        **figures(found),
    }
