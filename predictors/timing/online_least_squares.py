"""What does each part of a load cost, where only totals are seen? Least squares that forget.

Rule: no part costs less than nothing. What was seen fades, so that a lasting change is followed; what is
believed of a part does not. It moves towards what is found by as much as the last total told of this part. So
a part of which nothing is heard stays what it was last thought to be, however long that lasts, and never
becomes so uncertain that one total could make anything of it.
"""

from collections.abc import Sequence
from operator import mul

# Plain floats: once between two steps of an engine, numpy takes four times as long for so few numbers.
Row = list[float]

# Each observation begins from the last solution, so few passes over the coefficients are enough.
_SWEEPS = 2


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    found: float = sum(map(mul, a, b))
    return found


class OnlineLeastSquares:
    """`decay` is what still counts of it after one more observation. Beliefs stay at or above `least`.
    `doubts` are their precisions: one over the square of a deviation."""

    def __init__(self, costs: Sequence[float], *, decay: float, least: float = 0.0) -> None:
        self.costs: Row = list(costs)
        self.beliefs: Row = [max(one, least) for one in costs]
        self._forgets = decay
        self._least = least
        # The normal equations of what was seen.
        self._rows: list[Row] = [[0.0] * len(costs) for _ in costs]
        self._totals: Row = [0.0] * len(costs)

    def prediction_variance(self, load: Row, doubts: Row) -> float:
        """How far the total of this load may lie from the truth, squared."""
        found = 0.0
        for at, part in enumerate(load):
            found += part * part / (self._rows[at][at] + doubts[at])
        return found

    def observe(self, load: Row, total: float, *, weight: float, doubts: Row) -> None:
        """`weight` is a precision too: of this total."""
        decay = self._forgets
        for at, part in enumerate(load):
            counted, row = weight * part, self._rows[at]
            for to, other in enumerate(load):
                row[to] = decay * row[to] + counted * other
            self._totals[at] = decay * self._totals[at] + counted * total
        self._solve(doubts)
        for at, doubt in enumerate(doubts):
            told = weight * load[at] ** 2 / (self._rows[at][at] + doubt)
            moved = self.beliefs[at] + told * (self.costs[at] - self.beliefs[at])
            self.beliefs[at] = max(moved, self._least)

    def keep(self, share: float) -> None:
        """Of what was seen, no more than this counts from now on."""
        self._rows = [[share * one for one in row] for row in self._rows]
        self._totals = [share * one for one in self._totals]

    def _solve(self, doubts: Row) -> None:
        """Towards the least squares, one cost after the other."""
        costs = self.costs
        for _ in range(_SWEEPS):
            for at, row in enumerate(self._rows):
                others = dot(row, costs) - row[at] * costs[at]
                wanted = self._totals[at] + doubts[at] * self.beliefs[at] - others
                costs[at] = max(0.0, wanted / (row[at] + doubts[at]))
