"""Do the stated quantiles hold? Each level is moved by what happens, so that it holds whatever drifts.

Rule (adaptive conformal inference, Gibbs and Candès 2021, on quantiles as in Angelopoulos et al. 2023):
an answer above a level moves it up by `step * level`, one below moves it down by `step * (1 - level)`.
Over any long stretch the share below a level then is that level, whatever the forecasts were. Moves are in
units of each forecast's own spread, and small while the levels hold: a move that nothing asked for is noise.
Levels that reservations rest on move twice as far: the sooner their coverage is back the better, and what
noise that adds is far out, where it costs little. While many answers fall outside, outward moves are larger.
"""

from dataclasses import dataclass, field

import numpy as np

from controlplane.core.memory import Floats
from predictors.output_length.model import LEVELS, MEDIAN, UPPER

_LEVELS = np.array(LEVELS)
_SMALL_STEP, _STEP, _FIRST_STEP, _STEP_DECAY = 0.04, 0.08, 0.4, 20.0
_STEP_FACTORS = np.where(LEVELS[UPPER] > _LEVELS, 1.0, 2.0)
_CALM_MARGIN = 0.06
_MIN_SPREAD = 0.1
_MAX_OFFSET = 12.0
_COVERAGE_WINDOW = 50
_OUT_BELOW, _BACK_ABOVE = 0.78, 0.86
_WIDEN = 2.0
# Of a normal law, between the levels 0.1 and 0.9.
_NORMAL_DEVIATIONS = 2.563


@dataclass(slots=True)
class Conformal:
    """`is_out`: lately too many answers were longer than their 0.9 quantile."""

    offsets: Floats = field(default_factory=lambda: np.zeros(len(LEVELS)))
    seen: int = 0
    covered: float = 0.9
    is_out: bool = False

    def adjusted(self, log_quantiles: Floats) -> Floats:
        moved = log_quantiles + self.offsets * _spread(log_quantiles)
        return np.maximum.accumulate(moved)

    def observe(self, adjusted: Floats, log_tokens: float, top: float) -> None:
        """`adjusted` as it was stated; `top` is the request's own limit, which no answer passes."""
        self.seen += 1
        # An answer cut at the limit says nothing of levels beyond it.
        below = (log_tokens <= adjusted + 1e-9) | (adjusted >= top)
        is_calm = abs(self.covered - LEVELS[UPPER]) < _CALM_MARGIN
        step = np.maximum(
            _STEP_FACTORS * (_SMALL_STEP if is_calm else _STEP), _FIRST_STEP / (1 + self.seen / _STEP_DECAY)
        )
        move = step * (_LEVELS - below)
        if self.is_out:
            outward = (move > 0) == (LEVELS[MEDIAN] <= _LEVELS)
            move = np.where(outward, _WIDEN * move, move)
        self.offsets = np.clip(self.offsets + move, -_MAX_OFFSET, _MAX_OFFSET)
        self.covered += (float(below[UPPER]) - self.covered) / _COVERAGE_WINDOW
        self.is_out = self.covered < (_BACK_ABOVE if self.is_out else _OUT_BELOW)


def _spread(log_quantiles: Floats) -> float:
    return max(_MIN_SPREAD, float(log_quantiles[UPPER] - log_quantiles[0]) / _NORMAL_DEVIATIONS)
