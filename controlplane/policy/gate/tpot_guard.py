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


def tpot_feasible(tempo: DecodeLoad, waiting: Waiting) -> bool:
    request = waiting.request
    then = tempo.with_one(request, waiting.footprint.steps)
    if then.tightest is None:
        return True
    step, alone = then.step(then.sequences, then.cells), tempo.step(request.sequences, request.prompt_tokens)
    usable = 1.0 - tempo.lost_share
    if step > usable * then.tightest >= alone:
        return False
    kept = _chances(tempo, tempo.step(tempo.sequences, tempo.cells))
    kept_then = _chances(then, step)
    lost = float((kept - kept_then[: len(kept)]).sum())
    is_attainable = request.slo.tpot is not None and usable * request.slo.tpot >= alone
    return lost <= 0.0 or lost < (float(kept_then[-1]) if is_attainable else 1.0)


def _chances(tempo: DecodeLoad, step: float) -> Floats:
    """That each promise is kept, were steps to go on like this."""
    spare = (
        (1.0 - tempo.lost_share) * tempo.left - tempo.tokens * step - tempo.unread * tempo.per_prompt_token
    )
    if not tempo.lost_deviation:
        return (spare >= 0.0).astype(np.float64)
    deviations = spare / (tempo.lost_deviation * np.sqrt(tempo.tokens))
    return np.array([0.5 + 0.5 * erf(one / sqrt(2)) for one in deviations.tolist()], dtype=np.float64)
