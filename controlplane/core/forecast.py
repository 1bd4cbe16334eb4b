"""Distribution of the output length, conditioned on the tokens produced so far."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor
from operator import le, lt

Piece = tuple[float, float, float, float]
"""Part of a distribution between two points: tokens at its end, half of its density, probability of more
tokens than that, and the expected excess over its end (0 for outputs that end before)."""


@dataclass(frozen=True)
class LengthForecast:
    """Output tokens as a piecewise-linear distribution function through (level, tokens) points.

    `levels` rise strictly from 0 to 1; `tokens` never fall. Both ends are included: the shortest and the
    longest output considered possible. Raises ValueError otherwise.
    """

    levels: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(map(lt, self.levels, self.levels[1:]))
        sorted_tokens = all(map(le, self.tokens, self.tokens[1:]))
        ends = len(self.levels) >= 2 and (self.levels[0], self.levels[-1]) == (0.0, 1.0)
        if not (rising and sorted_tokens and ends and len(self.levels) == len(self.tokens)):
            raise ValueError(
                f"forecast {self.levels} -> {self.tokens}: levels rise from 0 to 1, tokens never fall, "
                "one token count a level"
            )

    @cached_property
    def mean(self) -> float:
        """Expected output tokens."""
        return _mean(self.levels, self.tokens)

    def quantile(self, level: float) -> float:
        """Tokens not exceeded with probability `level`, between 0 and 1."""
        index = min(bisect_right(self.levels, level), len(self.levels) - 1)
        (a, x), (b, y) = self._points[index - 1], self._points[index]
        return x + (y - x) * (level - a) / (b - a)

    def level_of(self, tokens: float) -> float:
        """Probability of an output of at most `tokens`."""
        if tokens >= self.tokens[-1]:
            return 1.0
        if tokens < self.tokens[0]:
            return 0.0
        index = bisect_right(self.tokens, tokens)
        (a, x), (b, y) = self._points[index - 1], self._points[index]
        return a + (b - a) * (tokens - x) / (y - x)

    def levels_of(self, ascending: Iterable[float]) -> list[float]:
        """`level_of` of each of some numbers of tokens, which ascend."""
        found, index, tokens, points = [], 0, self.tokens, self._points
        for count in ascending:
            while index < len(tokens) and tokens[index] <= count:
                index += 1
            if index == len(tokens):
                found.append(1.0)
            elif not index:
                found.append(0.0)
            else:
                (a, x), (b, y) = points[index - 1], points[index]
                found.append(a + (b - a) * (count - x) / (y - x))
        return found

    def remaining(self, *, after: int) -> "LengthForecast":
        """Distribution of the remaining tokens, given that `after` were produced and the output continues.

        An output that outran its forecast is expected to produce up to half as much again: it is only known
        to be long.
        """
        if after == 0 and self.tokens[0] >= 1.0:
            return self
        return LengthForecast(*self._remaining(after))

    def mean_remaining(self, after: int) -> float:
        """Mean of `remaining` to the last bit, without building it."""
        if after == 0 and self.tokens[0] >= 1.0:
            return self.mean
        return _mean(*self._remaining(after))

    def _remaining(self, after: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Levels and tokens of `remaining`."""
        passed = self.level_of(after)
        if passed >= 1.0:
            return (0.0, 1.0), (1.0, max(1.0, after / 2))
        first, left = bisect_right(self.levels, passed), 1 - passed
        levels = [(level - passed) / left for level in self.levels[first:]]
        tokens = [max(1.0, count - after) for count in (self.quantile(passed), *self.tokens[first:])]
        return (0.0, *levels), tuple(tokens)

    def expected_remaining(self, after: int) -> float:
        """Mean output beyond `after`, at least 1; called for every request in every step.

        It is up to a token less than `mean_remaining`, because the shortest of `remaining` is one token.
        """
        piece = self.piece(after)
        if piece is None:
            return (1.0 + max(1.0, after / 2)) / 2
        end, half_density, beyond, excess = piece
        left = end - after
        half = half_density * left
        mean = ((half + beyond) * left + excess) / (half + beyond + half)
        return mean if mean > 1.0 else 1.0

    def piece(self, after: int) -> Piece | None:
        """The piece that contains an output of `after` tokens; None if it outran the forecast."""
        index = bisect_right(self.tokens, after)
        if index == len(self.tokens):
            return None
        if (found := self._pieces.get(index)) is None:
            found = self._pieces[index] = self._piece(index)
        return found

    def _piece(self, index: int) -> Piece:
        """The piece that ends at this point; the first one begins at 0."""
        levels, tokens = self.levels, self.tokens
        level, end = levels[index], tokens[index]
        below, fewer = (levels[index - 1], tokens[index - 1]) if index else (0.0, 0.0)
        density = (level - below) / (end - fewer) if end > fewer else 0.0
        spans = zip(levels[index:], levels[index + 1 :], tokens[index:], tokens[index + 1 :], strict=False)
        excess = sum([(b - a) * ((x + y) / 2 - end) for a, b, x, y in spans])
        return end, density / 2, 1.0 - level, excess

    def likely_total(self, after: int, limit: int) -> tuple[int, int]:
        """The fewest and the most tokens of an output that has `after`: at least 80 % lie between.

        The quantiles 0.1 of outputs that reach its piece and 0.9 of those that pass it, at most `limit`. Of
        an output that outran the forecast only `limit` is known.
        """
        index = bisect_right(self.tokens, after)
        fewest, most = self._likely_totals[index] if index < len(self.tokens) else (0, limit)
        return min(fewest, limit), min(most, limit)

    @cached_property
    def _likely_totals(self) -> tuple[tuple[int, int], ...]:
        """`likely_total` for each piece in `_pieces`."""
        starts = (0.0, *self.levels)
        return tuple(
            (floor(self.quantile(start + 0.1 * (1 - start))), ceil(self.quantile(end + 0.9 * (1 - end))))
            for start, end in zip(starts, self.levels, strict=False)
        )

    @cached_property
    def _pieces(self) -> dict[int, Piece]:
        """The pieces asked for so far, by the index of their last point: of most forecasts it is one."""
        return {}

    @cached_property
    def _points(self) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self.levels, self.tokens, strict=True))


def _mean(levels: Sequence[float], tokens: Sequence[float]) -> float:
    """Mean of the distribution through these points."""
    spans = zip(levels, levels[1:], tokens, tokens[1:], strict=False)
    return sum([(b - a) * (x + y) / 2 for a, b, x, y in spans])
