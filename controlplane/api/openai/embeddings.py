"""POST /v1/embeddings: one float32 vector per input, in the order of the inputs."""

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.errors import Problem
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json, ticket_headers
from controlplane.api.protocol.requests import HEADER_TOKEN_IDS, EmbeddingRequest
from controlplane.core.ports import Embedder, Vectors
from controlplane.service.gate.gate import Embedded
from controlplane.service.request_jobs import EmbedJob, TruncationRequest
from controlplane.service.service import Service

# Encoding blocks the event loop for about 1 ms per this many rows of 1,024 floats; then it yields.
_ROWS_PER_SLICE = 16


def embedding_route(service: Service, endpoints: EndpointFactory) -> Route:
    """The route of embeddings."""
    return endpoints.route("/v1/embeddings", EmbeddingRequest, partial(_serve, service))


async def _serve(service: Service, request: ParsedRequest[EmbeddingRequest], send: Send) -> None:
    body = request.body
    job, embedded, vectors = await computed_vectors(
        service,
        request,
        body.inputs,
        truncation=_truncation(body),
        prompt=body.prompt_name,
        dimensions=body.dimensions,
        takes_any_ids=body.token_ids is not None,
    )
    values = await encoded_vectors(vectors, is_base64=body.encoding_format == "base64")
    rows = (b'{"object":"embedding","index":%d,"embedding":%b}' % row for row in enumerate(values))
    tokens = job.request.prompt_tokens
    tail = {
        # As in vLLM; OpenAI's object has neither.
        "id": f"embd-{request.origin.request_id}",
        "created": int(time.time()),
        "model": body.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    reply = b'{"object":"list","data":[' + b",".join(rows) + b"]," + orjson.dumps(tail)[1:]
    await send_json(send, reply, ticket_headers([embedded.ticket]))


async def computed_vectors(
    service: Service,
    request: ParsedRequest[Any],
    inputs: Sequence[str] | Sequence[Sequence[int]],
    *,
    truncation: TruncationRequest | None,
    prompt: str | None,
    dimensions: int | None,
    takes_any_ids: bool = False,
) -> tuple[EmbedJob, Embedded, Vectors]:
    """Admits and computes the inputs of `request`; returns the job, its ticket, and vectors [inputs, n].

    n is `dimensions`, or the model's dimension if that is None. With `takes_any_ids`, or the header that says
    so, token ids are embedded as they are. Raises Problem, Refused, Rejected,
    BackendDown, BackendFailed.
    """
    job = await service.intake.embeddings(
        request.origin,
        request.body.model,
        inputs,
        truncation=truncation,
        prompt=prompt,
        takes_any_ids=_has_any_ids(request.headers) or takes_any_ids,
    )
    if dimensions is not None:
        _check_dimensions(job.embedder, dimensions)
    request.memory.hold_tokens(job.request.prompt_tokens)
    embedded = await service.gate.embed(job)
    vectors = embedded.vectors
    service.intake.remember_vectors(job, vectors)
    if dimensions is not None and dimensions != vectors.shape[1]:
        vectors = shortened(vectors, dimensions)
    return job, embedded, vectors


def _has_any_ids(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the header states that token ids are meant as they are. Raises Problem for another value."""
    stated = [value for name, value in headers if name == HEADER_TOKEN_IDS.encode()]
    for value in stated:
        if value != b"as-given":
            raise Problem(
                400,
                f"{HEADER_TOKEN_IDS}={value.decode('latin-1')[:40]!r}: should be as-given; change it or "
                "leave it out",
                param=HEADER_TOKEN_IDS,
                code="invalid_value",
            )
    return bool(stated)


def _truncation(body: EmbeddingRequest) -> TruncationRequest | None:
    wanted, side = body.truncate_prompt_tokens, body.truncation_side
    if wanted is None and side is not None:
        raise Problem(
            400,
            f"truncation_side={side!r}: has no effect without truncate_prompt_tokens; add it too",
            param="truncation_side",
            code="invalid_value",
        )
    return None if wanted is None else TruncationRequest(None if wanted == -1 else wanted, side)


def _check_dimensions(embedder: Embedder, wanted: int) -> None:
    known = sorted({embedder.dimension, *embedder.supported_dimensions})
    if wanted not in known:
        raise Problem(
            400,
            f"dimensions={wanted}: {embedder.model} supports {', '.join(map(str, known))}; choose one or "
            "leave it out",
            param="dimensions",
            code="invalid_value",
        )


async def encoded_vectors(vectors: Vectors, *, is_base64: bool) -> list[bytes]:
    """Encodes each row as a JSON list, or as a JSON string with its little-endian float32 in base64."""
    plain = np.ascontiguousarray(vectors, dtype="<f4")
    rows: list[bytes] = []
    for index, vector in enumerate(plain):
        if index % _ROWS_PER_SLICE == _ROWS_PER_SLICE - 1:
            await asyncio.sleep(0)
        shown = b64encode(vector.tobytes()).decode() if is_base64 else vector
        rows.append(orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY))
    return rows


# In half precision a unit vector deviates from unit length by at most this much.
_TOLERANCE = 1e-2


def shortened(vectors: Vectors, dimensions: int) -> Vectors:
    """Truncates vectors [inputs, n] to [inputs, dimensions]; unit vectors are scaled to unit length again.

    Valid only for models trained for it (Matryoshka representation learning, Kusupati et al. 2022).
    """
    cut = vectors[:, :dimensions]
    is_unit = np.abs(np.linalg.norm(vectors, axis=1, keepdims=True) - 1) <= _TOLERANCE
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    # A row of zeros cannot be scaled.
    scaled: Vectors = cut / np.where(is_unit & (lengths > 0), lengths, np.float32(1))
    return scaled
