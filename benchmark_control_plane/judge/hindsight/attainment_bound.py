"""Upper bound on attainment: a linear program over time slots in which parts of requests count.

Device time, KV blocks, sequences and tokens of a step are limited in each slot, not at each step, and a
request spreads its least work over the slots of its window. What a step does is divided among the slots that
it overlaps, so every schedule of the device is a solution, and none attains more than the program.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from benchmark_control_plane.judge.hindsight.least_work import RequestWork
from benchmark_control_plane.judge.hindsight.slot_program import SlotProgram
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from controlplane.core.memory_ledger import Floats

_MOST_SLOTS = 300
# Pairs of a request and a slot, which the solver's time depends on: so many, or so many a request.
_MOST_PAIRS, _PAIRS_EACH = 6_000, 4
_LONGER = 1.25
# The solver's own tolerance; a bound is rounded up by it.
_TOLERANCE = 1e-6


def bound_of_parts(parts: Floats) -> float:
    """Largest share of the requests that any schedule could serve in time, from `served_parts`."""
    return min(1.0, float(parts.mean()) + _TOLERANCE) if len(parts) else 1.0


def served_parts(works: Sequence[RequestWork], device: SimulatedDeviceSection) -> Floats:
    """Part of each request that the program serves, in the order of `works`.

    Raises ArithmeticError if the solver finds no optimum.
    """
    from scipy.optimize import linprog

    possible = [work for work in works if work.is_possible]
    parts = np.zeros(len(works))
    if not possible:
        return parts
    program = SlotProgram(device, _edges(possible))
    columns = {work.planned.id: program.add_request(work) for work in possible}
    for work in works:
        if work.before is not None and work.planned.id in columns:
            program.add_order(columns[work.planned.id], columns.get(work.before))
    found = linprog(
        program.costs(list(columns.values())),
        A_ub=program.at_most.matrix(program.width),
        b_ub=np.array(program.at_most.limits),
        A_eq=program.equal.matrix(program.width),
        b_eq=np.array(program.equal.limits),
        bounds=np.column_stack((np.zeros(program.width), np.concatenate(program.upper))),
        method="highs-ipm",
    )
    if not found.success:
        raise ArithmeticError(f"the linear program of {len(works)} requests has no optimum: {found.message}")
    for number, work in enumerate(works):
        if work.planned.id in columns:
            parts[number] = found.x[columns[work.planned.id]]
    return parts


def _edges(works: Sequence[RequestWork]) -> Floats:
    """Edges of equal slots, as short as the limits on the size of the program allow."""
    start, end = min(work.release for work in works), max(work.due for work in works)
    windows = np.array([(work.release, work.due) for work in works])
    slot = (end - start) / _MOST_SLOTS
    most = max(_MOST_PAIRS, _PAIRS_EACH * len(works))
    while (np.ceil((windows[:, 1] - windows[:, 0]) / slot) + 1).sum() > most:
        slot *= _LONGER
    edges: Floats = start + slot * np.arange(ceil((end - start) / slot) + 1, dtype=np.float64)
    return edges
