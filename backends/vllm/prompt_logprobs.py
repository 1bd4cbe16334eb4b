"""Converts the log probabilities of a prompt in slices, between which the event loop serves other requests.

vLLM converts those of all tokens of a prompt at once, on the event loop. Importing this module imports vLLM,
which takes seconds.
"""

import asyncio
from collections.abc import Callable, Iterator
from copy import copy
from functools import wraps
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from backends.vllm.sampling import token_logprob

_METHOD = "_update_prompt_logprobs"
# Of prompt tokens; each has up to 21 log probabilities.
_SLICE = 64


class PendingLogprobs:
    """Log probabilities of a prompt that vLLM's method `convert` has not converted yet.

    Those of earlier positions are converted; `processor` holds them.
    """

    def __init__(self, convert: Callable[[Any, Any], None], processor: Any) -> None:
        self._convert = convert
        # The processor goes on with the output.
        self._processor = copy(processor)
        self._tensors: list[Any] = []

    def add(self, tensors: Any) -> None:
        """Adds the tensors of further positions, as the engine sent them."""
        self._tensors.append(tensors)

    def slices(self) -> Iterator[list[Any]]:
        """The log probabilities by position, some positions at a time, as vLLM would have returned them."""
        found = self._processor.prompt_logprobs
        yield list(found)
        for tensors in self._tensors:
            for begin in range(0, len(tensors[0]), _SLICE):
                seen, names = len(found), tensors._fields[:3]
                part = {name: getattr(tensors, name)[begin : begin + _SLICE] for name in names}
                self._convert(self._processor, tensors._replace(**part))
                yield found[seen:]


def defer_prompt_logprobs() -> None:
    """Has vLLM leave the log probabilities of prompts as `PendingLogprobs`.

    Has no effect on a release that converts them elsewhere.
    """
    convert = getattr(LogprobsProcessor, _METHOD, None)
    if convert is None or hasattr(convert, "__wrapped__"):
        return

    @wraps(convert)
    def defer(processor: Any, tensors: Any) -> None:
        if not isinstance(processor.prompt_logprobs, PendingLogprobs):
            processor.prompt_logprobs = PendingLogprobs(convert, processor)
        processor.prompt_logprobs.add(tensors)

    setattr(LogprobsProcessor, _METHOD, defer)


async def convert_prompt_logprobs(output: RequestOutput) -> None:
    """Replaces the log probabilities of an output's prompt by TokenLogprob, None for the first token.

    Only the first output of a sample has them.
    """
    stated, tokens, found = output.prompt_logprobs, iter(output.prompt_token_ids or ()), []
    for part in stated.slices() if isinstance(stated, PendingLogprobs) else [stated]:
        # A slice ends before the tokens do; it comes first, or zip would take a token too many.
        pairs = zip(part, tokens, strict=False)
        found += [None if each is None else token_logprob(token, each, None) for each, token in pairs]
        await asyncio.sleep(0)
    output.prompt_logprobs = found
