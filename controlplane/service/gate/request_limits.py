"""Limits of a request besides memory: lengths of texts, truncation, and numbers of values in the answer.

A long text is charged to its tenant's rate limits before it is tokenized, by a job of the fewest tokens that
it can have.
"""

from collections.abc import Sequence

from controlplane.core.errors import Refused
from controlplane.core.generation import Sampling
from controlplane.core.ports import Embedder, Generator
from controlplane.core.request import Kind
from controlplane.core.text_limits import TextLimit
from controlplane.service.gate.request_builder import RequestBuilder, RequestFields
from controlplane.service.request_jobs import EmbedJob, GenerateJob, TruncationRequest

# Special tokens, and tokens that a cut of the text changes.
_CUT_TOKENS = 64


def text_limit(generator: Generator) -> TextLimit:
    """The longest prompt of a generator."""
    return TextLimit(generator.model, generator.max_model_tokens, generator.max_token_characters)


def input_limit(embedder: Embedder) -> TextLimit:
    """The longest input of an embedding model or reranker."""
    return TextLimit(embedder.model, embedder.max_input_tokens, embedder.max_token_characters)


def bounded_texts(texts: Sequence[str], embedder: Embedder, truncation: int | None) -> Sequence[str]:
    """The texts, each with no more characters than its tokens can have.

    Of a text that will be truncated to `truncation` tokens both ends are kept, since it may be cut at either.
    Raises Refused for a text that is too long where None is given.
    """
    if truncation is None:
        limit = input_limit(embedder)
        for position, text in enumerate(texts):
            limit.check(len(text), param="input", where=f"input[{position}]")
        return texts
    end = (truncation + _CUT_TOKENS) * embedder.max_token_characters
    return [text if len(text) <= 2 * end else text[:end] + text[-end:] for text in texts]


def truncation_limit(truncation: TruncationRequest, embedder: Embedder) -> int:
    """The tokens that are kept. Raises Refused if the model does not accept so many."""
    most = embedder.max_input_tokens
    if truncation.tokens is not None and truncation.tokens > most:
        raise Refused(
            f"truncate_prompt_tokens={truncation.tokens}: {embedder.model} accepts at most {most:,}; lower "
            "it, or use -1 for the model's limit",
            param="truncate_prompt_tokens",
        )
    return most if truncation.tokens is None else truncation.tokens


def generate_job_to_charge(
    requests: RequestBuilder, fields: RequestFields, generator: Generator, characters: int, sampling: Sampling
) -> GenerateJob:
    """A job of the fewest prompt tokens that so many characters can have, and of one output token."""
    least = text_limit(generator).least_tokens(characters)
    request = requests.build(fields, Kind.GENERATE, generator.model, least, 1, sampling.n)
    return GenerateJob(request, range(least), sampling)


def embed_job_to_charge(
    requests: RequestBuilder, fields: RequestFields, embedder: Embedder, texts: Sequence[str]
) -> EmbedJob:
    """A job of the fewest tokens that the texts can have together."""
    least = input_limit(embedder).least_tokens(sum(map(len, texts)))
    request = requests.build(fields, Kind.EMBED, embedder.model, least, 0, len(texts))
    return EmbedJob(request, embedder, (range(least),))


def require_special_tokens(inputs: Sequence[Sequence[int]], embedder: Embedder) -> None:
    """Raises Refused for token ids that the model's tokenizer does not make of any text."""
    opening, closing = (list(part) for part in embedder.special_tokens)
    for position, ids in enumerate(inputs):
        ends_rightly = not closing or list(ids[-len(closing) :]) == closing
        if ends_rightly and list(ids[: len(opening)]) == opening:
            continue
        raise Refused(
            f"input[{position}] lacks the token ids that {embedder.model} has around every text ({opening} "
            f"before, {closing} after), so another tokenizer made it. Send texts (in LangChain's "
            "OpenAIEmbeddings: check_embedding_ctx_length=False), or the header x-token-ids: as-given (on "
            '/v1/embeddings also token_ids: "as-given") to embed the ids as they are.',
            param="input",
            code="foreign_token_ids",
        )


def check_prompt_logprobs(sampling: Sampling, prompt_tokens: int, generator: Generator) -> None:
    """Raises Refused for a prompt whose log probabilities would take memory that the pool does not count."""
    most = generator.max_prompt_logprobs
    if sampling.prompt_logprobs is not None and prompt_tokens > most:
        raise Refused(
            f"echo with logprobs: the prompt has {prompt_tokens:,} tokens, and this engine has memory for "
            f"the log probabilities of {most:,}. Leave out echo or logprobs, or have the operator leave out "
            "models.chat.engine.worker_extension_cls.",
            param="echo",
        )


def answer_limit(
    max_tokens: int,
    sampling: Sampling,
    prompt_tokens: int,
    prompts: int,
    most_values: int,
    *,
    is_stated: bool,
) -> int:
    """The limit of output tokens, lowered so that the answers of a body have at most `most_values` values.

    A value is a token or an alternative to it; an echoed prompt has some, too. A single choice
    without log probabilities is bounded by the context only. Raises Refused for a limit that the client
    stated (`is_stated`) and that is too high.
    """
    values_per_token = sampling.n * (1 + (sampling.logprobs or 0))
    if values_per_token == 1:
        return max_tokens
    echoed = prompt_tokens if sampling.is_echoed else 0
    most = most_values // (values_per_token * prompts) - echoed
    if most < 1 or (is_stated and max_tokens > most):
        raise Refused(
            f"n={sampling.n}, logprobs={sampling.logprobs or 0}, max_tokens={max_tokens:,} and {prompts} "
            f"prompts make {(max_tokens + echoed) * values_per_token * prompts:,} tokens and alternatives; "
            f"server.limits.max_answer_values is {most_values:,}. Lower one of them.",
            param="n" if sampling.n > 1 else "logprobs",
            code="answer_too_large",
        )
    return min(max_tokens, most)
