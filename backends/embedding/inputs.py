"""Can this model embed these token ids, and what does it want before a text?"""

from collections.abc import Sequence

import numpy as np

from backends.embedding.handshake import EncoderFacts
from backends.embedding.ipc import Ids
from controlplane.core.ports import Refused


def checked(inputs: Sequence[Sequence[int]], facts: EncoderFacts) -> list[Ids]:
    """uint32 ids, input by input. Raises Refused."""
    if not inputs:
        raise Refused("input is empty: give at least one text or token array", param="input")
    return [_checked_input(position, ids, facts) for position, ids in enumerate(inputs)]


def _checked_input(position: int, ids: Sequence[int], facts: EncoderFacts) -> Ids:
    if not len(ids):
        raise Refused(f"input {position} has no tokens: send one at least or leave it out", param="input")
    if len(ids) > facts.max_input_tokens:
        raise Refused(
            f"input {position} has {len(ids)} tokens: the model takes 1 to {facts.max_input_tokens}; "
            "split the text",
            param="input",
            code="context_length_exceeded",
        )
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= facts.vocabulary:
        raise Refused(
            f"input {position} has token id {lowest if lowest < 0 else highest}: the model's "
            f"ids run from 0 to {facts.vocabulary - 1}; tokenise with its own tokenizer",
            param="input",
        )
    return np.asarray(ids, dtype=np.uint32)


def prompt_text(name: str | None, facts: EncoderFacts) -> str:
    """What goes before a text: the prompt of that name, or the model's default. Raises Refused."""
    if name is not None and name not in facts.prompts:
        known = ", ".join(sorted(facts.prompts)) or "none"
        raise Refused(
            f"prompt_name={name!r}: the model has no such prompt; it has {known}", param="prompt_name"
        )
    return facts.prompts.get(name or facts.default_prompt or "", "")
