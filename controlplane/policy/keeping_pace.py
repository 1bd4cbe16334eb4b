"""Would one more answer slow those under way below the pace that they were promised?

Rule: TPOT is a mean, so what counts is the time that an answer has left for the tokens still to come; prompts
that will be read meanwhile take their usual share of it. With the newcomer each step is longer, and its
prompt is read besides. It must not start

1. if then somebody would be late who would not be without it, those that were promised nothing aside; or
2. if then a step would take longer than the tightest promise allows, and would not with the newcomer alone.

Who is late whatever is done holds nobody back, nor does a promise that no step could keep. What is embedded
beside is not counted: embeddings are cut to the slack that decoding leaves.
"""

from controlplane.core.memory import Floats
from controlplane.core.view import Tempo, Waiting


def keeps_pace(tempo: Tempo, waiting: Waiting) -> bool:
    request = waiting.request
    then = tempo.with_one(request, waiting.footprint.steps)
    if then.tightest is None:
        return True
    usable = 1.0 - tempo.prompt_share
    step = then.step(then.sequences, then.cells)
    tightest = usable * then.tightest
    if step > tightest >= tempo.step(request.sequences, request.prompt_tokens):
        return False
    left = usable * tempo.left
    is_in_time = left >= _needed(tempo, tempo.step(tempo.sequences, tempo.cells), tempo.unread)
    is_late_then = left < _needed(tempo, step, then.unread)
    return not bool((is_in_time & is_late_then).any())


def _needed(tempo: Tempo, step: float, unread: int) -> Floats:
    return tempo.tokens * step + unread * tempo.per_prompt_token
