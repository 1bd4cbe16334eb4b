"""Tokenizes texts in the server or in the worker, and validates token ids against the model."""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import orjson
from tokenizers import Tokenizer

from backends.embedding.handshake import EncoderFacts
from backends.embedding.ipc import Frame, FrameKind, Ids, unpack_inputs
from backends.embedding.pair_template import split_types
from controlplane.core.errors import BackendDown, Refused
from controlplane.core.text_limits import check_expansion

# WordPiece drops spaces and replaces a word of more than 100 letters by one token, so of a long text it is
# never certain that it has too many tokens. Texts with more characters per token are not served.
_LEAST_TOKEN_CHARACTERS = 128
# The tokenizer takes hundreds of bytes for each character of what it tokenizes at once.
_BATCH_CHARACTERS = 1 << 17


def token_characters(tokenizer: Tokenizer) -> int:
    """Most characters per token that are served: the longest token's, or more."""
    return max(_LEAST_TOKEN_CHARACTERS, *map(len, tokenizer.get_vocab()))


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sequence[int]]:
    """Token ids of each text, special tokens included, as arrays of four bytes a token: many may wait.

    Raises Refused for texts that the tokenizer might make many times as long.
    """
    check_expansion(texts, param="input")
    found: list[Sequence[int]] = []
    for batch in _batches(texts):
        found += [array("I", each.ids) for each in tokenizer.encode_batch_fast(batch)]
    return found


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in parts of at most `_BATCH_CHARACTERS`, or of one longer text."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


class PendingTokenizations:
    """Tokenizations in flight at the worker; each waits for its response or for the worker's end."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)

    async def tokenize(self, texts: Sequence[str], send: Callable[[Frame], None]) -> list[Sequence[int]]:
        """Tokenizes `texts` in the worker as `token_ids` does; `send` transmits the request.

        Raises Refused as it does, and BackendDown if the worker ends, or cannot tokenize one of the texts.
        """
        if not all(map(str.isascii, texts)):
            await asyncio.to_thread(check_expansion, texts, param="input")
        number = next(self._numbers)
        response = self._pending[number] = asyncio.get_running_loop().create_future()
        send(Frame(FrameKind.TEXTS, number, orjson.dumps(list(texts))))
        try:
            payload = await response
        finally:
            del self._pending[number]
        if not payload:
            raise BackendDown("the embedding worker failed to tokenize")
        lengths, ids = unpack_inputs(payload)
        return [array("I", part.tobytes()) for part in np.split(ids, np.cumsum(lengths)[:-1])]

    def resolve(self, frame: Frame) -> None:
        """Completes the tokenization that `frame` responds to, if it still waits."""
        response = self._pending.get(frame.number)
        if response is not None and not response.done():
            response.set_result(frame.payload)

    def fail_all(self, reason: str) -> None:
        """Fails all pending tokenizations with BackendDown."""
        for response in self._pending.values():
            if not response.done():
                response.set_exception(BackendDown(reason))


def validate_inputs(inputs: Sequence[Sequence[int]], facts: EncoderFacts) -> list[Ids]:
    """Returns the ids as uint32 arrays, one per input.

    Raises Refused if there is no input, or an input is empty, too long or has an id outside the vocabulary.
    """
    if not inputs:
        raise Refused("input is empty; send at least one text or token array", param="input")
    return [_validate_input(position, ids, facts) for position, ids in enumerate(inputs)]


def _validate_input(position: int, ids: Sequence[int], facts: EncoderFacts) -> Ids:
    if not len(ids):
        raise Refused(f"input {position} has no tokens; send at least one or remove the input", param="input")
    if len(ids) > facts.max_input_tokens:
        raise Refused(
            f"input {position} has {len(ids)} tokens: the model takes 1 to {facts.max_input_tokens}; "
            "split the text or set truncate_prompt_tokens",
            param="input",
            code="context_length_exceeded",
        )
    lowest = min(ids)
    # The ids of a pair carry its token types.
    highest = max(ids) if facts.pairs is None else int(split_types(np.asarray(ids, np.uint32))[0].max())
    if lowest < 0 or highest >= facts.vocabulary:
        raise Refused(
            f"input {position} has token id {lowest if lowest < 0 else highest}: the model's "
            f"ids run from 0 to {facts.vocabulary - 1}; tokenize with its own tokenizer",
            param="input",
        )
    return np.asarray(ids, dtype=np.uint32)


def prompt_text(name: str | None, facts: EncoderFacts) -> str:
    """Text of the named prompt, or of the model's default. Raises Refused for an unknown name."""
    if name is not None and name not in facts.prompts:
        known = ", ".join(sorted(facts.prompts)) or "none"
        raise Refused(
            f"prompt_name={name!r}: the model has no such prompt; it has {known}", param="prompt_name"
        )
    return facts.prompts.get(name or facts.default_prompt or "", "")
