"""Can this model embed these token ids, and what does it want before a text?"""

from collections.abc import Sequence

import numpy as np

from backends.embedding.contract import EncoderFacts
from backends.embedding.framing import Ids
from controlplane.core.ports import Refused


def checked(inputs: Sequence[Sequence[int]], facts: EncoderFacts) -> list[Ids]:
    """uint32 ids, input by input. Raises Refused."""
    if not inputs:
        raise Refused("input is empty: give at least one text or token array", param="input")
    return [_checked_input(position, ids, facts) for position, ids in enumerate(inputs)]


def _checked_input(position: int, ids: Sequence[int], facts: EncoderFacts) -> Ids:
    found = np.asarray(ids, dtype=np.int64)
    if not len(found):
        raise Refused(f"input {position} has no tokens: send one at least or leave it out", param="input")
    if len(found) > facts.max_input_tokens:
        raise Refused(
            f"input {position} has {len(found)} tokens: the model takes 1 to {facts.max_input_tokens}; "
            "split the text",
            param="input",
            code="context_length_exceeded",
        )
    if found.min() < 0 or found.max() >= facts.vocabulary:
        raise Refused(
            f"input {position} has token id {found.min() if found.min() < 0 else found.max()}: the model's "
            f"ids run from 0 to {facts.vocabulary - 1}; tokenise with its own tokenizer",
            param="input",
        )
    return found.astype(np.uint32)


def prompt_text(name: str | None, facts: EncoderFacts) -> str:
    """What goes before a text: the prompt of that name, or the model's default. Raises Refused."""
    if name is not None and name not in facts.prompts:
        known = ", ".join(sorted(facts.prompts)) or "none"
        raise Refused(
            f"prompt_name={name!r}: the model has no such prompt; it has {known}", param="prompt_name"
        )
    return facts.prompts.get(name or facts.default_prompt or "", "")
