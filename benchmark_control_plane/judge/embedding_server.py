"""Baseline embedding server: Tandem's embedding worker behind a plain endpoint, without the gate.

    python -m benchmark_control_plane.judge.embedding_server --port 8001 [--model tandem/minilm]
        [--settings '{"device": "cuda", "dtype": "float16"}']

It batches first come first served, without classes or deadlines, and drops requests of clients that
disconnect. Model, device, kernels, batching and encoding are those of Tandem, so a comparison isolates the
control plane.
"""

import argparse
import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from backends.embedding.client import WorkerEmbedder
from controlplane.config.loader import parse_as
from controlplane.config.models_section import EmbeddingModel
from controlplane.core.clock import Instant
from controlplane.core.errors import Refused
from controlplane.core.ports import Vectors
from controlplane.core.request import Kind
from controlplane.core.request import Request as Asked
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.engine_builders import embedder_of

_CLIENT_CLOSED_REQUEST = 499

_ANY_CLASS = ServiceClass("any", Slo(), priority=0, sheddable=False)


def application(embedder: WorkerEmbedder) -> Starlette:
    """ASGI application with `/health` and `/v1/embeddings`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await embedder.start()
        try:
            yield
        finally:
            await embedder.stop()

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    async def embeddings(request: Request) -> Response:
        body = orjson.loads(await request.body())
        given = body["input"] if isinstance(body["input"], list) else [body["input"]]
        inputs = given if isinstance(given[0], list) else await embedder.tokenize(given)
        tokens = sum(map(len, inputs))
        asked = Asked(
            id="", kind=Kind.EMBED, model=embedder.model, tenant="", service_class=_ANY_CLASS,
            slo=_ANY_CLASS.slo, arrival=Instant(0), prompt_tokens=tokens, max_output_tokens=0,
        )  # fmt: skip
        try:
            vectors = await _unless_disconnected(request, embedder.embed(asked, inputs, deadline=None))
        except Refused as error:
            return _json({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        if vectors is None:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        rows = [
            {"object": "embedding", "index": i, "embedding": b64encode(row.tobytes()).decode()}
            for i, row in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "data": rows, "model": embedder.model, "usage": usage})

    routes = [Route("/health", health), Route("/v1/embeddings", embeddings, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Vectors]) -> Vectors | None:
    """Result of `work`, or None if the client disconnects first.

    The body has been read, so the next message can only be the disconnect.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def _json(content: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def embedder_from(arguments: Sequence[str] | None) -> tuple[WorkerEmbedder, int]:
    """Embedder and port from the command line; exits with 2 if the settings are invalid."""
    parser = argparse.ArgumentParser(prog="embedding_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tandem/minilm")
    parser.add_argument("--settings", default="{}", help="JSON object with further keys of models.embeddings")
    options = parser.parse_args(arguments)
    try:
        stated = {"model": options.model, **json.loads(options.settings)}
        model = parse_as(EmbeddingModel, stated, source="--settings")
        return embedder_of(model, idle_cpu_priority=bool(model.idle_cpu_priority)), options.port
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves on 127.0.0.1 until interrupted."""
    embedder, port = embedder_from(arguments)
    uvicorn.run(application(embedder), host="127.0.0.1", port=port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
