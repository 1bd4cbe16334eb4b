"""POST /v1/embeddings: texts or token ids in, one float32 vector each out, in their order."""

import asyncio
from base64 import b64encode
from functools import partial

import numpy as np
import orjson
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.endpoint import EndpointFactory, ParsedRequest, send_json, ticket_headers
from controlplane.api.errors import Problem
from controlplane.api.protocol.requests import EmbeddingRequest
from controlplane.core.ports import Vectors
from controlplane.service.jobs import TruncationRequest
from controlplane.service.service import Service

# Encoding holds the event loop, about 1 ms for this many rows of 1,024 floats; others go between.
_ROWS_AT_ONCE = 16


def embedding_route(service: Service, reception: EndpointFactory) -> Route:
    return reception.route("/v1/embeddings", EmbeddingRequest, partial(_answer, service))


async def _answer(service: Service, ask: ParsedRequest[EmbeddingRequest], send: Send) -> None:
    body = ask.body
    job = await service.intake.embeddings(
        ask.request_id,
        ask.caller,
        body.model,
        body.inputs,
        ask.hints,
        truncation=_cut(body),
        prompt=body.prompt_name,
    )
    if body.dimensions is not None:
        _check_dimensions(service, body.model, body.dimensions)
    embedded = await service.gate.embed(job)
    vectors = embedded.vectors
    service.intake.remember_vectors(job, vectors)
    if body.dimensions not in (None, vectors.shape[1]):
        vectors = shortened(vectors, body.dimensions)
    rows = await _encoded(vectors, is_base64=body.encoding_format == "base64")
    tokens = job.request.prompt_tokens
    tail = {"model": body.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    reply = b'{"object":"list","data":[' + b",".join(rows) + b"]," + orjson.dumps(tail)[1:]
    await send_json(send, reply, ticket_headers([embedded.ticket]))


def _cut(body: EmbeddingRequest) -> TruncationRequest | None:
    wanted, side = body.truncate_prompt_tokens, body.truncation_side
    if wanted is None and side is not None:
        raise Problem(
            400,
            f"truncation_side={side!r}: only says where truncate_prompt_tokens cuts; give that too",
            param="truncation_side",
            code="invalid_value",
        )
    return None if wanted is None else TruncationRequest(None if wanted == -1 else wanted, side)


def _check_dimensions(service: Service, model: str, wanted: int) -> None:
    native, supported = service.status.embedding_dimensions(model)
    known = sorted({native, *supported})
    if wanted not in known:
        raise Problem(
            400,
            f"dimensions={wanted}: {model} gives {', '.join(map(str, known))}; choose one or leave it out",
            param="dimensions",
            code="invalid_value",
        )


async def _encoded(vectors: Vectors, *, is_base64: bool) -> list[bytes]:
    """One JSON object a row; base64 is of little-endian float32."""
    plain = np.ascontiguousarray(vectors, dtype="<f4")
    rows: list[bytes] = []
    for index, vector in enumerate(plain):
        if index % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
        shown = b64encode(vector.tobytes()).decode() if is_base64 else vector
        row = {"object": "embedding", "index": index, "embedding": shown}
        rows.append(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
    return rows


# FOLDED dimensions.py:
# What is a shorter embedding? The first numbers of the whole one, at unit length again if that was.
#
# Right only for models trained for it (Matryoshka representation learning, Kusupati et al. 2022).

# Half precision leaves a unit vector so far from unit length at most.
_TOLERANCE = 1e-2


def shortened(vectors: Vectors, dimensions: int) -> Vectors:
    cut = vectors[:, :dimensions]
    is_unit = np.abs(np.linalg.norm(vectors, axis=1, keepdims=True) - 1) <= _TOLERANCE
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    # A row of zeros has no direction to keep.
    scaled: Vectors = cut / np.where(is_unit & (lengths > 0), lengths, np.float32(1))
    return scaled
