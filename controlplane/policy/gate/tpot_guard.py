"""Tests whether one more request would slow the running ones below their TPOT objectives.

TPOT is a mean, so what counts is the time that a request has left for its remaining tokens. Prefills take
their usual share of that time. The variation of this share from step to step gives the probability that an
objective is met (normal distribution; over n steps the deviation grows by the square root of n). With the new
request every step is longer, and its prompt must be prefilled too. It must not start

1. if the running requests lose more expected met objectives than the new request is likely to meet; or
2. if a step would then take longer than the tightest TPOT allows, and would not with the new request alone.

Objectives of classes below that of the new request do not count; a client of a low class could hold back all
higher ones by a TPOT that only an idle engine meets.

A request counts also while no memory is free for it: the engine starts it in place of a larger one, and a
full memory holds so many small requests that steps take longer than the objectives allow (decision 0095).

Requests that miss their TPOT in any case hold back no other, nor does an objective that no step can meet:
such a new request counts as one without a TPOT, whose completion is worth one met objective. The time that
embeddings take is not counted.
"""

from math import erf, sqrt

import numpy as np

from controlplane.core.memory_ledger import Floats
from controlplane.core.pool_view import DecodeLoad, Waiting


def tpot_feasible(load: DecodeLoad, waiting: Waiting) -> bool:
    """Whether `waiting` may start in addition to `load`; all times in nanoseconds."""
    request = waiting.request
    load = load.to_classes_from(request.service_class.priority)
    load_with = load.with_request(request, waiting.footprint)
    if load_with.tightest is None:
        return True
    step, alone_step = load.step_with(request), load.step(request.sequences, request.prompt_tokens)
    usable = 1.0 - load.prefill_share
    if step > usable * load_with.tightest >= alone_step:
        return False
    chances = _chances(load, load.present_step)
    chances_with = _chances(load_with, step)
    lost = float((chances - chances_with[: len(chances)]).sum())
    is_attainable = request.slo.tpot is not None and usable * request.slo.tpot >= alone_step
    return lost <= 0.0 or lost < (float(chances_with[-1]) if is_attainable else 1.0)


def _chances(load: DecodeLoad, step: float) -> Floats:
    """Probability that each TPOT objective is met if all further steps take `step` ns, float64 [n]."""
    spare = (
        (1.0 - load.prefill_share) * load.time_left
        - load.tokens * step
        - load.prompt_tokens_pending * load.per_prompt_token
    )
    if not load.prefill_deviation:
        return (spare >= 0.0).astype(np.float64)
    deviations = spare / (load.prefill_deviation * np.sqrt(load.tokens))
    return np.array(
        [0.5 + 0.5 * erf(deviation / sqrt(2)) for deviation in deviations.tolist()], dtype=np.float64
    )
