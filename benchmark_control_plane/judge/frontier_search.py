"""Which rate is the highest that keeps enough promises? Bisection between the last load that does and the
first that does not.

Rule: the loads measured anyway come first; the lowest of them that misses the target ends the search,
whatever higher ones say, for attainment that returns under more load is luck. Nothing is asked of load 0,
which keeps everything. Within the last interval attainment is taken as linear.
"""

from collections.abc import Callable, Mapping

AttainmentAt = Callable[[float], float | None]
"""None where it could not be measured."""


def highest_load(
    measured: Mapping[float, float],
    target: float,
    *,
    steps: int = 0,
    attainment_at: AttainmentAt | None = None,
) -> float | None:
    """As a load. `measured` holds attainment by load; `attainment_at` measures at most `steps` more.

    None where even the lowest load misses the target and nothing more may be measured. The highest
    measured load is returned where all reach the target: the true one is at least that.
    """
    good, kept = 0.0, 1.0
    for load in sorted(measured):
        if measured[load] >= target:
            good, kept = load, measured[load]
            continue
        bad, missed = load, measured[load]
        break
    else:
        return good or None
    for _ in range(steps if attainment_at is not None else 0):
        assert attainment_at is not None
        middle = (good + bad) / 2
        if (found := attainment_at(middle)) is None:
            break
        if found >= target:
            good, kept = middle, found
        else:
            bad, missed = middle, found
    if not good:
        return None
    return good + (bad - good) * (kept - target) / (kept - missed)
