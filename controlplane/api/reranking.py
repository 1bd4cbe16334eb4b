"""POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /score: relevance of documents to a query.

A request with many documents is one request of the gate, with one deadline.
"""

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json, ticket_headers
from controlplane.api.protocol.rerank_messages import (
    EitherRerankRequest,
    PairFields,
    RerankRequest,
    ScoreRequest,
    TextDocument,
)
from controlplane.core.errors import BackendFailed
from controlplane.core.ports import Vectors
from controlplane.service.gate.gate import Embedded
from controlplane.service.request_jobs import MODEL_LIMIT, EmbedJob, TextPairs, TruncationRequest
from controlplane.service.service import Service

_SCORE, _LOGIT = 0, 1
Scores = npt.NDArray[np.float32]


def rerank_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of reranking and scoring."""
    rerank, score = partial(_rerank, service), partial(_score, service)
    return [
        *(endpoints.route(path, RerankRequest, rerank) for path in ("/v1/rerank", "/v2/rerank")),
        endpoints.route("/rerank", EitherRerankRequest, partial(_rerank_either, service)),
        *(endpoints.route(path, ScoreRequest, score) for path in ("/v1/score", "/score")),
    ]


async def _rerank(
    service: Service, request: ParsedRequest[RerankRequest] | ParsedRequest[EitherRerankRequest], send: Send
) -> None:
    body = request.body
    # The either form has checked that there are documents.
    documents = [body.documents] if isinstance(body.documents, str) else body.documents or []
    texts = _limited(body, TextPairs([body.query], [_text(document) for document in documents]))
    job, scored = await _scored(service, request, texts, _truncation(body))
    scores = _column(body, scored.vectors)
    tokens = job.request.prompt_tokens
    results: list[dict[str, object]] = []
    for index in _ranked(scores)[: body.top_n or None]:
        result: dict[str, object] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents is not False:
            document = documents[index]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    reply = {
        "id": f"rerank-{request.origin.request_id}",
        "model": job.request.model,
        "results": results,
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}},
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    try:
        body_text = orjson.dumps(reply)
    except TypeError:
        # A document holds an integer beyond 64 bits.
        body_text = (await asyncio.to_thread(json.dumps, reply, ensure_ascii=False)).encode()
    await send_json(send, body_text, ticket_headers([scored.ticket]))


async def _rerank_either(service: Service, request: ParsedRequest[EitherRerankRequest], send: Send) -> None:
    body = request.body
    if body.texts is None:
        await _rerank(service, request, send)
        return
    truncation: TruncationRequest | None = _truncation(body)
    if body.truncate is False:
        truncation = None
    elif body.truncation_direction is not None:
        is_left = body.truncation_direction.lower() == "left"
        truncation = TruncationRequest(_truncation(body).tokens, "left" if is_left else "right")
    texts = TextPairs([body.query], body.texts, document_field="texts")
    _, scored = await _scored(service, request, texts, truncation)
    # text-embeddings-inference applies the logistic function to the logits of every model.
    logits = scored.vectors[:, _LOGIT]
    scores = logits if body.raw_scores else _logistic(logits)
    reply = [
        {"index": index, "score": float(scores[index])}
        | ({"text": body.texts[index]} if body.return_text else {})
        for index in _ranked(scores)[: body.top_n or None]
    ]
    await send_json(send, orjson.dumps(reply), ticket_headers([scored.ticket]))


async def _score(service: Service, request: ParsedRequest[ScoreRequest], send: Send) -> None:
    body = request.body
    first, second = body.sides
    texts = _limited(body, TextPairs(body.texts(first), body.texts(second), first, second))
    job, scored = await _scored(service, request, texts, _truncation(body))
    tokens = job.request.prompt_tokens
    reply = {
        "id": f"score-{request.origin.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": job.request.model,
        "data": [
            {"index": index, "object": "score", "score": float(score)}
            for index, score in enumerate(_column(body, scored.vectors))
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    await send_json(send, orjson.dumps(reply), ticket_headers([scored.ticket]))


async def _scored(
    service: Service, request: ParsedRequest[Any], texts: TextPairs, truncation: TruncationRequest | None
) -> tuple[EmbedJob, Embedded]:
    """Scores the pairs; an error names the field of the document at fault."""
    job = await service.intake.pairs.job(request.origin, request.body.model, texts, truncation)
    request.memory.hold_tokens(job.request.prompt_tokens)
    try:
        return job, await service.gate.embed(job)
    except BackendFailed as error:
        error.field = texts.document_field
        raise


def _truncation(body: PairFields) -> TruncationRequest:
    tokens, side = body.truncate_prompt_tokens, body.truncation_side
    if tokens in (None, -1):
        return MODEL_LIMIT if side is None else TruncationRequest(None, side)
    return TruncationRequest(tokens, side)


def _limited(body: PairFields, texts: TextPairs) -> TextPairs:
    # 0 sets no limit.
    return replace(
        texts,
        query_tokens=body.max_tokens_per_query or None,
        document_tokens=body.max_tokens_per_doc or None,
    )


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document["text"]


def _column(body: PairFields, rows: Vectors) -> Scores:
    """The scores that a request selects: with the model's activation unless it says otherwise."""
    return rows[:, _LOGIT if body.use_activation is False else _SCORE]


def _ranked(scores: Scores) -> list[int]:
    """Positions by falling score; equal scores keep their order."""
    ranked: list[int] = np.argsort(-scores, kind="stable").tolist()
    return ranked


def _logistic(logits: Scores) -> Scores:
    """1 / (1 + exp(-x)) without overflow."""
    found: Scores = (0.5 * (1 + np.tanh(0.5 * logits))).astype(np.float32)
    return found
