"""Would one more answer slow those under way below the pace that they were promised?

Rule: TPOT is a mean, so what counts is the time that an answer has left for the tokens still to come. Prompts
that will be read meanwhile, and embeddings beyond what decoding can spare, take their usual share of it; how
much that varies from step to step says how likely the promise is kept (a normal law; in n steps the
deviation grows by the root of n). With the newcomer each step is longer, and its prompt is read besides. It
must not start

1. if that loses more of the promises under way than it is likely to keep itself; or
2. if then a step would take longer than the tightest promise allows, and would not with the newcomer alone.

So who is late whatever is done holds nobody back, nor does a promise that no step could keep: such a newcomer
counts as one that was promised nothing, whose answer is worth a promise. What is embedded in the slack that
decoding leaves is not counted: it gives way.
"""

from math import erf, sqrt

import numpy as np

from controlplane.core.memory import Floats
from controlplane.core.view import DecodeLoad, Waiting


def tpot_feasible(load: DecodeLoad, waiting: Waiting) -> bool:
    request = waiting.request
    load_with = load.with_one(request, waiting.footprint.steps)
    if load_with.tightest is None:
        return True
    step, alone_step = (
        load_with.step(load_with.sequences, load_with.cells),
        load.step(request.sequences, request.prompt_tokens),
    )
    usable = 1.0 - load.lost_share
    if step > usable * load_with.tightest >= alone_step:
        return False
    chances = _chances(load, load.step(load.sequences, load.cells))
    chances_with = _chances(load_with, step)
    lost = float((chances - chances_with[: len(chances)]).sum())
    is_attainable = request.slo.tpot is not None and usable * request.slo.tpot >= alone_step
    return lost <= 0.0 or lost < (float(chances_with[-1]) if is_attainable else 1.0)


def _chances(load: DecodeLoad, step: float) -> Floats:
    """That each promise is kept, were steps to go on like this."""
    spare = (1.0 - load.lost_share) * load.left - load.tokens * step - load.unread * load.per_prompt_token
    if not load.lost_deviation:
        return (spare >= 0.0).astype(np.float64)
    deviations = spare / (load.lost_deviation * np.sqrt(load.tokens))
    return np.array(
        [0.5 + 0.5 * erf(deviation / sqrt(2)) for deviation in deviations.tolist()], dtype=np.float64
    )
