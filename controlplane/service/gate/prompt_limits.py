"""Bounds what a request costs before and after admission: its texts, their tokenization, and its answer."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from controlplane.core.errors import Refused
from controlplane.core.generation import Sampling
from controlplane.core.ports import Embedder, Generator
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS, TextLimit
from controlplane.service.fair_slots import FairSlots
from controlplane.service.request_jobs import EmbedJob, GenerateJob

Tokens = TypeVar("Tokens")

# Special tokens, and tokens that a cut of the text changes.
_CUT_TOKENS = 64


class PromptTokenizer:
    """Tokenizes short texts at once, and long ones after their tenant was charged, in slots taken in turn.

    `charge` charges a job to its tenant's rate limits; it raises Rejected.
    """

    def __init__(self, threads: int, charge: Callable[[GenerateJob | EmbedJob], None]) -> None:
        self._charge = charge
        self._slots = FairSlots(threads)

    async def tokenize(
        self,
        characters: int,
        work: Callable[[], Awaitable[Tokens]],
        untokenized: Callable[[], GenerateJob | EmbedJob],
    ) -> tuple[Tokens, int | None]:
        """The tokens that `work` returns, and how many were charged before. Raises Refused, Rejected.

        `untokenized` gives the job of a long text by a lower bound of its tokens.
        """
        if characters <= LONG_TEXT_CHARACTERS:
            return await work(), None
        job = untokenized()
        self._charge(job)
        found = await self._slots.run(job.request.tenant, work)
        return found, job.request.prompt_tokens


def text_limit(generator: Generator) -> TextLimit:
    """The longest prompt of a generator."""
    return TextLimit(generator.model, generator.max_model_tokens, generator.max_token_characters)


def bounded_texts(texts: Sequence[str], embedder: Embedder, truncation: int | None) -> Sequence[str]:
    """The texts, each with no more characters than its tokens can have.

    Of a text that will be truncated to `truncation` tokens both ends are kept, since it may be cut at either.
    Raises Refused for a text that is too long where None is given.
    """
    if truncation is None:
        limit = TextLimit(embedder.model, embedder.max_input_tokens, embedder.max_token_characters)
        for position, text in enumerate(texts):
            limit.check(len(text), param="input", where=f"input[{position}]")
        return texts
    end = (truncation + _CUT_TOKENS) * embedder.max_token_characters
    return [text if len(text) <= 2 * end else text[:end] + text[-end:] for text in texts]


def answer_limit(
    max_tokens: int, sampling: Sampling, prompts: int, most_values: int, *, is_stated: bool
) -> int:
    """The limit of output tokens, lowered so that the answers of a body have at most `most_values` values.

    A value is a token or an alternative to it. A single choice without log probabilities is bounded by the
    context only. Raises Refused for a limit that the client stated (`is_stated`) and that is too high.
    """
    values_per_token = sampling.n * (1 + (sampling.logprobs or 0))
    if values_per_token == 1:
        return max_tokens
    most = most_values // (values_per_token * prompts)
    if most < 1 or (is_stated and max_tokens > most):
        raise Refused(
            f"n={sampling.n}, logprobs={sampling.logprobs or 0}, max_tokens={max_tokens:,} and "
            f"{prompts} prompts make {max_tokens * values_per_token * prompts:,} tokens and alternatives; "
            f"server.limits.max_answer_values is {most_values:,}. Lower one of them.",
            param="n" if sampling.n > 1 else "logprobs",
            code="answer_too_large",
        )
    return min(max_tokens, most)
