"""POST /embed and / of text-embeddings-inference; its /rerank is in `reranking`."""

from functools import partial

import numpy as np
from starlette.routing import Route
from starlette.types import Send

from controlplane.api.error_dialects import renamed_fields
from controlplane.api.openai.embeddings import computed_vectors, encoded_vectors
from controlplane.api.post_endpoint import EndpointFactory, ParsedRequest, send_json, ticket_headers
from controlplane.api.protocol.tei_messages import TeiEmbedRequest
from controlplane.core.ports import Vectors
from controlplane.service.request_jobs import TruncationRequest
from controlplane.service.service import Service

# The names of fields in errors, and those of this protocol.
_FIELDS = {"input": "inputs", "truncate_prompt_tokens": "truncate"}


def tei_routes(service: Service, endpoints: EndpointFactory) -> list[Route]:
    """The routes of vectors: clients of Hugging Face post to the server's address, without a path."""
    serve = partial(_serve, service)
    return [endpoints.route(path, TeiEmbedRequest, serve) for path in ("/embed", "/")]


async def _serve(service: Service, request: ParsedRequest[TeiEmbedRequest], send: Send) -> None:
    body = request.body
    side = (body.truncation_direction or "right").lower()
    truncation = TruncationRequest(None, "left" if side == "left" else "right") if body.truncate else None
    with renamed_fields(_FIELDS):
        _, embedded, vectors = await computed_vectors(
            service,
            request,
            body.listed,
            truncation=truncation,
            prompt=body.prompt_name,
            dimensions=body.dimensions,
        )
    if body.normalize is not False:
        vectors = _of_unit_length(vectors)
    rows = await encoded_vectors(vectors, is_base64=False)
    await send_json(send, b"[" + b",".join(rows) + b"]", ticket_headers([embedded.ticket]))


def _of_unit_length(vectors: Vectors) -> Vectors:
    """The vectors [inputs, dimensions] divided by their lengths; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.where(lengths > 0, lengths, np.float32(1))
    return scaled
