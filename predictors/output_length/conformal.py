"""Keeps quantile forecasts calibrated under drift, by adaptive conformal inference.

An output above a quantile moves the quantile up by `step * level`; one below moves it down by `step * (1 -
level)`. Over a long run the share of outputs below the quantile then converges to its level, whatever the
forecasts are (Gibbs and Candès 2021; on quantiles as in Angelopoulos et al. 2023). Offsets are in units of
each forecast's own spread. Steps are small while the coverage is right, to limit noise. Levels from 0.9 up,
which reservations use, move twice as far: their coverage recovers sooner, and the noise is in the tail, where
it costs little. While too many outputs exceed the 0.9 quantile, moves away from the median are doubled.

Of an output that ended at the request's limit only a lower bound of the length is known (right censoring). It
is above the quantiles below the limit. For those beyond, the forecast itself states the probability that the
output would have ended within each (Efron 1967, redistribution to the right). On average that moves no
quantile of a right forecast. Counted as within them, such outputs would lower the quantiles of requests with
larger limits.
"""

from dataclasses import dataclass, field

import numpy as np

from controlplane.core.memory_ledger import Floats
from predictors.output_length.quantile_model import LEVELS, MEDIAN, UPPER

_LEVELS = np.array(LEVELS)
_SMALL_STEP, _STEP, _FIRST_STEP, _STEP_DECAY = 0.04, 0.08, 0.4, 20.0
_STEP_FACTORS = np.where(LEVELS[UPPER] > _LEVELS, 1.0, 2.0)
_CALM_MARGIN = 0.06
_MIN_SPREAD = 0.1
_MAX_OFFSET = 12.0
_COVERAGE_WINDOW = 50
_OUT_BELOW, _BACK_ABOVE = 0.78, 0.86
_WIDEN = 2.0
# Standard deviations between the 0.1 and 0.9 quantiles of a normal distribution.
_NORMAL_DEVIATIONS = 2.563
_ROUNDING = 1e-9


@dataclass(slots=True)
class Conformal:
    """Conformal offsets of all levels, for one class and one forecaster.

    Attributes:
        offsets: [levels], added in units of the spread of each forecast.
        outcome_count: number of outcomes.
        covered: recent share of outputs within their 0.9 quantile.
        is_under_covered: whether too many outputs recently exceeded their 0.9 quantile.
    """

    offsets: Floats = field(default_factory=lambda: np.zeros(len(LEVELS)))
    outcome_count: int = 0
    covered: float = 0.9
    is_under_covered: bool = False

    def adjusted(self, log_quantiles: Floats) -> Floats:
        """Quantiles [levels] moved by the offsets and made non-decreasing."""
        moved = log_quantiles + self.offsets * _spread(log_quantiles)
        return np.maximum.accumulate(moved)

    def observe(self, adjusted: Floats, log_tokens: float, top: float) -> None:
        """Moves the offsets after an output of `log_tokens`.

        Args:
            adjusted: the forecast as it was stated, [levels].
            log_tokens: logarithm of the output length.
            top: logarithm of the request's token limit.
        """
        self.outcome_count += 1
        below = (log_tokens <= adjusted + _ROUNDING).astype(np.float64)
        if log_tokens >= top - _ROUNDING:
            below = _below_if_longer(adjusted, top)
        is_calm = abs(self.covered - LEVELS[UPPER]) < _CALM_MARGIN
        step = np.maximum(
            _STEP_FACTORS * (_SMALL_STEP if is_calm else _STEP),
            _FIRST_STEP / (1 + self.outcome_count / _STEP_DECAY),
        )
        move = step * (_LEVELS - below)
        if self.is_under_covered:
            outward = (move > 0) == (LEVELS[MEDIAN] <= _LEVELS)
            move = np.where(outward, _WIDEN * move, move)
        # `numpy.clip` takes three times as long for so few numbers.
        self.offsets = np.minimum(np.maximum(self.offsets + move, -_MAX_OFFSET), _MAX_OFFSET)
        self.covered += (float(below[UPPER]) - self.covered) / _COVERAGE_WINDOW
        self.is_under_covered = self.covered < (_BACK_ABOVE if self.is_under_covered else _OUT_BELOW)


def _below_if_longer(adjusted: Floats, top: float) -> Floats:
    """Probability, by the forecast, that an output longer than `top` is within each quantile, [levels]."""
    reached = float(np.interp(top, adjusted, _LEVELS, left=0.0))
    below: Floats = np.maximum(0.0, (_LEVELS - reached) / (1.0 - reached))
    return below


def _spread(log_quantiles: Floats) -> float:
    return max(_MIN_SPREAD, float(log_quantiles[UPPER] - log_quantiles[0]) / _NORMAL_DEVIATIONS)
