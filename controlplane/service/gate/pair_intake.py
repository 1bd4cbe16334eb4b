"""Turns rerank and score requests into embed jobs whose inputs are pairs of a query and a document.

A query is tokenized once for all its documents. The job is one request: one lease, one deadline, one outcome.
"""

import asyncio
from collections.abc import Container, Iterable, Sequence
from functools import partial
from itertools import repeat

from controlplane.core.errors import Refused
from controlplane.core.ports import Reranker, TruncationSide
from controlplane.core.request import Kind
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.fair_slots import FairSlots
from controlplane.service.gate.prompt_preparation import PromptTokenizer
from controlplane.service.gate.request_builder import RequestBuilder, RequestFields, named_backend
from controlplane.service.gate.request_limits import (
    bounded_texts,
    embed_job_to_charge,
    input_limit,
    truncation_limit,
)
from controlplane.service.request_jobs import EmbedJob, RequestOrigin, TextPairs, TruncationRequest

# Joining so many tokens takes about a millisecond; more are joined in a thread.
_TOKENS_INLINE = 16_000
# Above the tokens of any pair.
_UNCUT = 2**30


class PairIntake:
    """Validates, tokenizes and joins pairs; raises Refused naming the field of the body that is invalid."""

    def __init__(
        self,
        encoders: EncoderRegistry,
        served: Iterable[Container[str]],
        requests: RequestBuilder,
        tokenizer: PromptTokenizer,
    ) -> None:
        """`served` name all models, also those that do not rerank."""
        self._encoders = encoders
        self._served = served
        self._requests = requests
        self._tokenizer = tokenizer
        # Joining holds the interpreter lock: the event loop competes with one thread, not with many.
        self._joining = FairSlots(1)

    async def job(
        self, origin: RequestOrigin, model: str | None, texts: TextPairs, truncation: TruncationRequest | None
    ) -> EmbedJob:
        """The job that scores these pairs. Raises Refused, Rejected.

        `model` is a reranker; None for the only one that is served. A `truncation` cuts the longer text of a
        pair first; None refuses pairs that are too long.
        """
        reranker = self._reranker(model)
        if len(texts.queries) not in (1, len(texts.documents)):
            raise Refused(
                f"{texts.query_field} has {len(texts.queries):,} texts and {texts.document_field} "
                f"{len(texts.documents):,}; send one text in {texts.query_field}, or as many as in "
                f"{texts.document_field}",
                param=texts.query_field,
            )
        fields = self._requests.fields(origin)
        with self._encoders.bound(reranker):
            return await self._pairs_job(fields, reranker, texts, truncation)

    async def _pairs_job(
        self,
        fields: RequestFields,
        reranker: Reranker,
        texts: TextPairs,
        truncation: TruncationRequest | None,
    ) -> EmbedJob:
        limit = None if truncation is None else truncation_limit(truncation, reranker)
        if limit is None:
            _check_lengths(texts, reranker)
        bounded = bounded_texts([*texts.queries, *texts.documents], reranker, limit or _UNCUT)
        token_ids, charged = await self._tokenizer.tokenize(
            sum(map(len, bounded)),
            partial(reranker.tokenize, bounded),
            partial(embed_job_to_charge, self._requests, fields, reranker, bounded),
        )
        count = len(texts.queries)
        queries = [ids[: texts.query_tokens] for ids in token_ids[:count]]
        documents = [ids[: texts.document_tokens] for ids in token_ids[count:]]
        side = None if truncation is None else truncation.side
        most = self._requests.terms_of(fields.origin.caller).max_pair_tokens
        join = partial(self._joined, reranker, texts, queries, documents, limit, side, max_tokens=most)
        is_short = sum(map(len, token_ids)) + len(documents) * len(queries[0]) <= _TOKENS_INLINE
        tenant, in_thread = fields.origin.caller.tenant, partial(asyncio.to_thread, join)
        pairs = join() if is_short else await self._joining.run(tenant, in_thread)
        return self._job(fields, reranker, pairs, charged)

    def of_sizes(self, origin: RequestOrigin, model: str, sizes: Sequence[int]) -> EmbedJob:
        """The job of pairs of these token counts, for a dry run. Raises Refused."""
        fields = self._requests.fields(origin)
        reranker = self._reranker(model)
        if (longest := max(sizes)) > reranker.max_input_tokens:
            raise Refused(
                f"prompt_tokens={longest:,}: {reranker.model} accepts at most "
                f"{reranker.max_input_tokens:,} tokens in a pair; lower it",
                param="prompt_tokens",
            )
        return self._job(fields, reranker, [range(size) for size in sizes], None)

    def _job(
        self, fields: RequestFields, reranker: Reranker, pairs: Sequence[Sequence[int]], charged: int | None
    ) -> EmbedJob:
        tokens = sum(map(len, pairs))
        request = self._requests.build(fields, Kind.EMBED, reranker.model, tokens, 0, len(pairs))
        return EmbedJob(request, reranker, pairs, charged_tokens=charged)

    def _joined(
        self,
        reranker: Reranker,
        texts: TextPairs,
        queries: Sequence[Sequence[int]],
        documents: Sequence[Sequence[int]],
        limit: int | None,
        side: TruncationSide | None,
        *,
        max_tokens: int,
    ) -> list[Sequence[int]]:
        most = reranker.max_input_tokens if limit is None else limit
        each_query = repeat(queries[0], len(documents)) if len(queries) == 1 else iter(queries)
        found, tokens = [], 0
        for position, (query, document) in enumerate(zip(each_query, documents, strict=True)):
            pair = reranker.pair(query, document, limit or _UNCUT, side)
            if len(pair) > most:
                raise Refused(
                    f"{texts.document_field}[{position}] and {texts.query_field} have {len(pair):,} tokens; "
                    f"{reranker.model} accepts at most {most:,}. Shorten them, or let the server cut them.",
                    param=texts.document_field,
                    code="context_length_exceeded",
                )
            tokens += len(pair)
            if tokens > max_tokens:
                raise Refused(
                    f"{texts.document_field}: {position + 1:,} of {len(documents):,} pairs have {tokens:,} "
                    f"tokens already; server.limits.max_pair_tokens is {max_tokens:,}. Send fewer "
                    "or shorter documents.",
                    param=texts.document_field,
                    code="input_too_large",
                )
            found.append(pair)
        return found

    def _reranker(self, model: str | None) -> Reranker:
        return named_backend(self._encoders.rerankers, model, "reranking", others=self._served)


def _check_lengths(texts: TextPairs, reranker: Reranker) -> None:
    """Raises Refused for a text that no pair can hold."""
    limit = input_limit(reranker)
    for field, listed in (
        (texts.query_field, texts.queries), (texts.document_field, texts.documents)
    ):  # fmt: skip
        for position, text in enumerate(listed):
            limit.check(len(text), param=field, where=f"{field}[{position}]")
