"""Pools the `steps` rows of a log: the costs of a step, the spread of its time, and that of embedding passes.

A server's model of its steps forgets within seconds, so a single row holds for the seconds before it.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from controlplane.service.decision_log.log_rows import Row

_COSTS = ("step_s", "decode_s", "cell_s", "prompt_token_s")
# Of ten steps three take as long as the 0.1, four as the 0.5 and three as the 0.9 quantile.
_TIMES_DRAWN = (3, 4, 3)
_LEAST_FACTOR = 0.05
_MOST_TIMES_USUAL = 10


def pooled_costs(models: Sequence[Row]) -> tuple[float, float, float, float]:
    """Seconds per step, sequence, KV cell and prompt token: the mean of each over the steps observed.

    `models` are `llm` of the rows in order of time, at least one.
    """
    seen = [model["observed"] for model in models]
    # An engine that was started again begins to count again.
    weights = [now - before if now >= before else now for before, now in pairwise(seen)]
    # Without the beginning of its run, the first row counts all steps before the log.
    usual = round(median(weights)) if weights else seen[0]
    weights.insert(0, seen[0] if seen[0] <= _MOST_TIMES_USUAL * usual else usual)
    if not any(weights):
        weights = [1] * len(models)
    step, decode, cell, prompt_token = (fmean([model[name] for model in models], weights) for name in _COSTS)
    return step, decode, cell, prompt_token


def step_spread(models: Sequence[Row]) -> tuple[float, ...]:
    """Ten factors of mean 1 that the times of steps have to those expected, by the residuals of the rows."""
    known = [model["residuals"] for model in models if model["residuals"]]
    if not known:
        return (1.0,)
    levels = [max(_LEAST_FACTOR, 1 + fmean(each)) for each in zip(*known, strict=True)]
    factors = [level for level, times in zip(levels, _TIMES_DRAWN, strict=True) for _ in range(times)]
    mean = fmean(factors)
    return tuple(factor / mean for factor in factors)


def pass_factor(models: Sequence[Row]) -> float:
    """By what passes beside other work take longer than on an idle device; `models` are those of passes."""
    medians = [model["residuals"][1] for model in models if model["residuals"]]
    return max(_LEAST_FACTOR, 1 + median(medians)) if medians else 1.0
