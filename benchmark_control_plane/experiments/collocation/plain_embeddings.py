"""Serves embeddings naively: FastAPI around `SentenceTransformer.encode`, the baseline of the benchmarks.

One request at a time in a thread, torch with its own number of threads, no batching across requests and no
priorities: the simplest server that a team would deploy next to its LLM.

    python -m benchmark_control_plane.experiments.collocation.plain_embeddings
        MODEL --port PORT [--device cuda] [--dtype float16]

Without `--device`, sentence-transformers chooses one: a GPU if there is one.
"""

import argparse
from asyncio import Lock, to_thread
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from backends.bundled_models import resolve


def app_for(model: str, device: str | None, dtype: str | None, *, trust_remote_code: bool) -> FastAPI:
    """The application; the model loads here."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(
        resolve(model),
        device=device,
        trust_remote_code=trust_remote_code,
        model_kwargs={} if dtype is None else {"dtype": dtype},
    )
    app, encoding = FastAPI(), Lock()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        async with encoding:
            return Response(await to_thread(_encode, encoder, texts), media_type="application/json")

    return app


def _encode(encoder: Any, texts: list[str]) -> bytes:
    import orjson

    rows = encoder.encode(texts, show_progress_bar=False)
    found = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    return orjson.dumps({"object": "list", "data": found}, option=orjson.OPT_SERIALIZE_NUMPY)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    app = app_for(options.model, options.device, options.dtype, trust_remote_code=options.trust_remote_code)
    uvicorn.run(app, port=options.port, access_log=False, log_level="warning")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
