"""Lower bounds on the total latency of any schedule: a fluid relaxation and a time-indexed linear program.

Fluid: memory-time flows at M cells a round to the request of least volume. Time-indexed: each request is
spread over start rounds in fractions; the dual prices give the bound and show whether the horizon was too
short for it to hold. Both remain valid bounds if they are stopped early.
"""

from collections.abc import Sequence
from math import ceil

from ortools.linear_solver import pywraplp

from benchmark_control_plane.round_model.instance import HindsightInstance

_TOLERANCE = 1e-6


def fluid_latency_bound(instance: HindsightInstance) -> float:
    """Lower bound on the total latency in rounds, from the fluid relaxation.

    The completion of a request is the mean time of its memory use plus a constant of its shape. The sum of
    the means is least when smaller volumes go first (Goemans' mean busy times).
    """
    jobs, memory = instance.jobs, instance.memory
    left = [float(job.volume) for job in jobs]
    total = sum(_lag(job.prompt, job.output) / job.volume - job.arrival for job in jobs)
    now = 0.0
    while any(left):
        later = [jobs[i].release for i, rest in enumerate(left) if rest and jobs[i].release > now]
        ready = [i for i, rest in enumerate(left) if rest and jobs[i].release <= now]
        if not ready:
            now = min(later)
            continue
        first = min(ready, key=lambda i: (jobs[i].volume, i))
        until = min([now + left[first] / memory, *later])
        served = min(left[first], (until - now) * memory)
        total += served * (now + until) / 2 / jobs[first].volume
        is_done = until >= now + left[first] / memory
        left[first] = 0.0 if is_done else left[first] - served
        now = until
    return total


def _lag(prompt: int, output: int) -> float:
    """Sum over the cell-rounds of a request of their distance to its completion, in rounds."""
    return sum((output - k + 0.5) * (prompt + k) for k in range(1, output + 1))


def lp_bound(instance: HindsightInstance, known: Sequence[int], *, seconds: float) -> float | None:
    """Lower bound on the total latency from the time-indexed linear program; None if unsolved in time.

    `known` holds the starts of any feasible schedule; it sets the horizon.
    """
    jobs = instance.jobs
    horizon = max(p + job.output for p, job in zip(known, jobs, strict=True))
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetTimeLimit(int(seconds * 1_000))
    infinity = solver.infinity()
    rows = [solver.RowConstraint(-infinity, instance.memory, "") for _ in range(horizon + 1)]
    once = []
    for job in jobs:
        row = solver.RowConstraint(1, 1, "")
        once.append(row)
        for start in range(job.release, horizon - job.output + 1):
            share = solver.NumVar(0, infinity, "")
            solver.Objective().SetCoefficient(share, start + job.output)
            row.SetCoefficient(share, 1)
            for k in range(1, job.output + 1):
                rows[start + k].SetCoefficient(share, job.prompt + k)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    worth = [row.dual_value() for row in once]
    if max(worth) > horizon + 1:
        return None  # a start beyond the horizon might be better
    price = sum(row.dual_value() for row in rows)
    return float(sum(worth) + instance.memory * price - sum(job.arrival for job in jobs))


def rounded_up(bound: float, instance: HindsightInstance) -> float:
    """Rounds the bound up where all arrivals, and so all latencies, are whole numbers."""
    if all(job.arrival == job.release for job in instance.jobs):
        return float(ceil(bound - _TOLERANCE))
    return bound
