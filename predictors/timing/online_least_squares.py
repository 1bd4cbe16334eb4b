"""Non-negative recursive least squares with exponential forgetting and a prior per coefficient.

The model is `total = sum(load[i] * costs[i])` with costs >= 0; only totals are observed. Observations decay,
so the fit follows a lasting change. The prior means (`beliefs`) do not decay: each moves towards the fitted
cost by the share of the information that the last observation gave on that cost. A coefficient that no recent
load exercised therefore keeps its last value, and its variance stays bounded, so a single observation cannot
move it arbitrarily.
"""

from collections.abc import Sequence
from operator import mul

# Plain floats: for so few numbers, once per engine step, numpy takes four times as long.
Row = list[float]

# Each solve starts from the previous solution, so few coordinate-descent sweeps are enough. Not so at first,
# when each observation changes the solution a lot: with two the first cost would take the errors of all.
_SWEEPS = 2
_FIRST_SWEEPS = 32
_FIRST_OBSERVATIONS = 64


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Inner product of two sequences of equal length."""
    found: float = sum(map(mul, a, b))
    return found


class OnlineLeastSquares:
    """Online fit of the costs of the parts of a load.

    Args:
        costs: initial costs and prior means.
        decay: factor on the weight of earlier observations at each new one, 0 < decay <= 1.
        least: lower bound of the prior means.
    """

    def __init__(self, costs: Sequence[float], *, decay: float, least: float = 0.0) -> None:
        self.costs: Row = list(costs)
        self.beliefs: Row = [max(cost, least) for cost in costs]
        self._decay = decay
        self._least = least
        # Normal equations of the observations: matrix and right-hand side.
        self._rows: list[Row] = [[0.0] * len(costs) for _ in costs]
        self._totals: Row = [0.0] * len(costs)
        # Observations since the start or the last change of the system.
        self._observed = 0

    def prediction_variance(self, load: Row, precisions: Row) -> float:
        """Approximate variance of the predicted total of `load`; off-diagonal terms are ignored.

        `precisions` are those of the prior means: 1 / deviation^2 for each.
        """
        found = 0.0
        for at, part in enumerate(load):
            found += part * part / (self._rows[at][at] + precisions[at])
        return found

    def observe(self, load: Row, total: float, *, weight: float, precisions: Row) -> None:
        """Updates the fit with the observed `total` of `load`; `weight` is the precision of `total`."""
        decay, rows, totals = self._decay, self._rows, self._totals
        for at, part in enumerate(load):
            counted, row = weight * part, rows[at]
            for to, other in enumerate(load):
                row[to] = decay * row[to] + counted * other
            totals[at] = decay * totals[at] + counted * total
        self._observed += 1
        self._solve(precisions)
        costs, beliefs, least = self.costs, self.beliefs, self._least
        for at, (part, belief) in enumerate(zip(load, beliefs, strict=True)):
            share = weight * part**2 / (rows[at][at] + precisions[at])
            moved = belief + share * (costs[at] - belief)
            beliefs[at] = moved if moved > least else least

    def keep(self, share: float) -> None:
        """Scales the weight of all earlier observations by `share`, after a change of the system."""
        self._rows = [[share * value for value in row] for row in self._rows]
        self._totals = [share * total for total in self._totals]
        self._observed = 0

    def _solve(self, precisions: Row) -> None:
        """Coordinate descent on the penalised normal equations, each cost clipped at 0."""
        costs, totals, beliefs = self.costs, self._totals, self.beliefs
        for _ in range(_FIRST_SWEEPS if self._observed <= _FIRST_OBSERVATIONS else _SWEEPS):
            for at, row in enumerate(self._rows):
                own, precision = row[at], precisions[at]
                others = sum(map(mul, row, costs)) - own * costs[at]
                cost = (totals[at] + precision * beliefs[at] - others) / (own + precision)
                costs[at] = cost if cost > 0.0 else 0.0
