"""Finds the highest load at which attainment reaches a target, by bisection.

The search starts from the loads measured anyway. The lowest of them that misses the target bounds the
interval, even if a higher one reaches it, because attainment that recovers under more load is noise. Load 0
counts as full attainment. Within the last interval attainment is interpolated linearly, so no planned load
within it may be without a valid run.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf

AttainmentAt = Callable[[float], float | None]
"""Measures the attainment at a load; None if no valid run was possible."""


def highest_load(
    measured: Mapping[float, float], target: float, *, steps: int, attainment_at: AttainmentAt
) -> float | None:
    """Highest load that reaches `target`.

    Args:
        measured: attainment by load.
        target: attainment to reach.
        steps: further measurements allowed.
        attainment_at: measures one load.

    Returns:
        The load; the highest measured load if all reach the target (a lower bound); None if none does.
    """
    good, attained = 0.0, 1.0
    for load in sorted(measured):
        if measured[load] >= target:
            good, attained = load, measured[load]
            continue
        bad, missed = load, measured[load]
        break
    else:
        return good or None
    for _ in range(steps):
        middle = (good + bad) / 2
        if (found := attainment_at(middle)) is None:
            break
        if found >= target:
            good, attained = middle, found
        else:
            bad, missed = middle, found
    if not good:
        return None
    return good + (bad - good) * (attained - target) / (attained - missed)


def is_decided(measured: Mapping[float, float], planned: Iterable[float], target: float) -> bool:
    """Whether no planned load without a measurement lies where attainment crosses `target`."""
    missed = min((load for load, attained in measured.items() if attained < target), default=inf)
    reached = max((load for load in measured if load < missed), default=0.0)
    return not any(reached < load < missed for load in planned)
