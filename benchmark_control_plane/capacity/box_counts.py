"""How many boxes of each kind serve a demand at the least cost, as an integer linear program.

Unknowns are the number of boxes of each kind and the rate of each part of the demand that each kind serves.
The work of a kind, in box-seconds per second, must stay below the target utilisation of its boxes. Work is
taken to be additive: a box that serves half its capacity of chat has half its capacity of embeddings left.
The program is solved by HiGHS (`scipy.optimize.milp`), to optimality.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

_INFEASIBLE = 2
_TOLERANCE = 1e-6
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OfferedKind:
    """A kind of box that may be used.

    Attributes:
        name: its name.
        cost: cost of a box, at least 0.
        work: box-seconds of a request, for each part of the demand that the kind serves.
        most: the most boxes.
    """

    name: str
    cost: float
    work: Mapping[str, float]
    most: int


@dataclass(frozen=True, slots=True)
class KindCount:
    """Boxes of a kind, the requests per second that they serve together, by part, and their utilisation."""

    name: str
    boxes: int
    rates: Mapping[str, float]
    utilisation: float


@dataclass(frozen=True, slots=True)
class BoxCounts:
    """The boxes of each kind.

    Attributes:
        counts: boxes by kind; if the demand cannot be served, the most of each kind.
        served: 1, or the largest share of each part of the demand that the most boxes serve together.
        short: the parts that hold it down: more of them cannot be served, even while no other gets more.
    """

    counts: Sequence[KindCount]
    served: float
    short: Sequence[str]


def count_boxes(demand: Mapping[str, float], kinds: Sequence[OfferedKind], utilisation: float) -> BoxCounts:
    """The cheapest boxes whose utilisation stays at most `utilisation`.

    Of equally cheap numbers the fewest boxes are taken, then those with the least work; then the work is
    spread so that the highest utilisation of a kind is the lowest possible.

    Args:
        demand: requests per second of each part of the demand, above 0.
        kinds: kinds of boxes.
        utilisation: above 0, at most 1.
    """
    program = _Program(demand, kinds, utilisation)
    boxes = program.cheapest()
    if boxes is not None:
        return BoxCounts(program.spread(boxes, 1.0), 1.0, ())
    most = np.array([kind.most for kind in kinds], dtype=float)
    served = program.largest_share(most)
    return BoxCounts(program.spread(most, served), served, program.short(most, served))


class _Program:
    """The matrices of the program: columns are boxes by kind, then rates by kind and part."""

    def __init__(self, demand: Mapping[str, float], kinds: Sequence[OfferedKind], utilisation: float) -> None:
        self.demand, self.kinds, self.utilisation = demand, kinds, utilisation
        self.pairs = [(k, part) for k, kind in enumerate(kinds) for part in demand if part in kind.work]
        self.work = np.zeros((len(kinds), len(self.pairs)))
        self.parts = np.zeros((len(demand), len(self.pairs)))
        rows = {part: row for row, part in enumerate(demand)}
        for column, (k, part) in enumerate(self.pairs):
            self.work[k, column] = kinds[k].work[part]
            self.parts[rows[part], column] = 1.0
        self.rates = np.array(list(demand.values()))

    def cheapest(self) -> _Array | None:
        """Boxes by kind; None if the demand cannot be served."""
        if not self._reaches_all():
            return None
        kinds, pairs = len(self.kinds), len(self.pairs)
        most = [float(kind.most) for kind in self.kinds]
        constraints = [
            LinearConstraint(np.hstack([-self.utilisation * np.eye(kinds), self.work]), -np.inf, 0.0),
            LinearConstraint(
                np.hstack([np.zeros((len(self.demand), kinds)), self.parts]), self.rates, self.rates
            ),
        ]
        nothing = np.zeros(pairs)
        objectives = (
            np.concatenate([[kind.cost for kind in self.kinds], nothing]),
            np.concatenate([np.ones(kinds), nothing]),
            np.concatenate([np.zeros(kinds), self.work.sum(axis=0)]),
        )
        for objective in objectives:
            found = milp(
                objective,
                integrality=np.concatenate([np.ones(kinds), nothing]),
                bounds=Bounds(0.0, np.concatenate([most, np.full(pairs, np.inf)])),
                constraints=constraints,
                options={"mip_rel_gap": 0.0},
            )
            if found.status == _INFEASIBLE:
                return None
            if found.x is None:
                raise ArithmeticError(f"HiGHS: {found.message}")
            # The next objective chooses among the solutions that are as good by this one.
            constraints.append(
                LinearConstraint(objective, -np.inf, found.fun * (1 + _TOLERANCE) + _TOLERANCE)
            )
        boxes: _Array = np.round(found.x[:kinds])
        return boxes

    def _reaches_all(self) -> bool:
        """Whether each part of the demand is served by a kind."""
        return len({part for _, part in self.pairs}) == len(self.demand)

    def largest_share(self, boxes: _Array) -> float:
        """The largest share of each part of the demand that these boxes serve."""
        if not self._reaches_all():
            return 0.0
        found = self._linear(
            objective=-1.0, equal=-self.rates, equals=np.zeros(len(self.rates)), spare=None, boxes=boxes
        )
        return float(min(1.0, found[-1]))

    def short(self, boxes: _Array, served: float) -> tuple[str, ...]:
        """The parts of which a larger share cannot be served while each other part gets `served`."""
        reached = {part for _, part in self.pairs}
        found = []
        for row, part in enumerate(self.demand):
            if part not in reached:
                found.append(part)
                continue
            own = np.zeros(len(self.demand))
            own[row] = -self.rates[row]
            rest = served * self.rates
            rest[row] = 0.0
            share = self._linear(objective=-1.0, equal=own, equals=rest, spare=None, boxes=boxes)[-1]
            if share <= served + _TOLERANCE:
                found.append(part)
        return tuple(found)

    def spread(self, boxes: _Array, served: float) -> list[KindCount]:
        """The rates that make the highest utilisation of a kind the lowest possible."""
        if served == 0.0 or not self.pairs:
            rates = np.zeros(len(self.pairs))
        else:
            rates = self._linear(
                objective=1.0, equal=np.zeros(len(self.demand)),
                equals=served * self.rates, spare=boxes, boxes=boxes,
            )[:-1]  # fmt: skip
        busy = self.work @ rates
        found = []
        for k, kind in enumerate(self.kinds):
            own = {part: float(rates[at]) for at, (of, part) in enumerate(self.pairs) if of == k}
            count = int(boxes[k])
            found.append(KindCount(kind.name, count, own, float(busy[k] / count) if count else 0.0))
        return found

    def _linear(
        self, *, objective: float, equal: _Array, equals: _Array, spare: _Array | None, boxes: _Array
    ) -> _Array:
        """Rates, and last a variable z that `objective` weighs; raises ArithmeticError without a solution.

        The rates of a part plus `equal` times z are `equals`. With `spare`, the work of a kind is at most
        `spare` times z, else at most the target utilisation of its boxes.
        """
        pairs = len(self.pairs)
        limit = np.zeros(len(self.kinds)) if spare is not None else self.utilisation * boxes
        slope = np.zeros((len(self.kinds), 1)) if spare is None else -spare[:, None]
        found = linprog(
            np.concatenate([np.zeros(pairs), [objective]]),
            A_ub=np.hstack([self.work, slope]),
            b_ub=limit,
            A_eq=np.hstack([self.parts, equal[:, None]]),
            b_eq=equals,
        )
        if found.x is None:
            raise ArithmeticError(f"HiGHS: {found.message}")
        solution: _Array = found.x
        return solution
