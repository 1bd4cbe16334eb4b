"""The HTTP application on a real service with scripted engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from backends.device.kv_memory import ElasticMemory
from backends.testing.scripted import Script, ScriptedEmbedder, ScriptedGenerator
from controlplane.api.app import create_app
from controlplane.api.settings import ApiSettings
from controlplane.config import Config, parse
from controlplane.config.models_section import RerankerModel, WorkerModel
from controlplane.core.errors import BackendDown
from controlplane.service.bootstrap import build_service
from controlplane.service.service import Service
from controlplane.service.worker_replacement import WorkerBuilder, WorkerNeeds

CHAT_MODEL = "chat-model"
EMBED_MODEL = "embed-model"
RERANK_MODEL = "rerank-model"
MODELS = {
    "chat": {"model": CHAT_MODEL},
    "embeddings": [{"model": EMBED_MODEL}],
    "rerankers": [{"model": RERANK_MODEL}],
}
MAX_RUNNING = 4
WORDS = ("Hello", " wörld\u2028", "!")
TEXT = "".join(WORDS)
HELLO = Script(tokens=len(WORDS), words=WORDS)


@dataclass
class Stage:
    """The application with its service and engines; `http` calls it in this process, without a socket."""

    service: Service
    app: FastAPI
    generator: ScriptedGenerator
    embedder: ScriptedEmbedder
    reranker: ScriptedEmbedder
    http: httpx.AsyncClient

    def is_clean(self) -> bool:
        """Whether no lease is open, no request waits and no engine works."""
        owners = self.service.status.state()["owners"].values()  # type: ignore[attr-defined]
        held = any(owner["held_bytes"] or owner["running"] or owner["waiting"] for owner in owners)
        tickets = self.service.gate.tickets()
        return not (held or tickets or self.generator.live or self.embedder.live or self.reranker.live)


def _worker(config: Config, model: WorkerModel) -> ScriptedEmbedder:
    """A worker with vectors of 16 dimensions; `broken` does not load."""
    is_reranker = isinstance(model, RerankerModel)
    worker = ScriptedEmbedder(
        model=model.served_name, dimension=2 if is_reranker else 16, max_input_tokens=64
    )
    if model.model == "broken":

        async def fail() -> None:
            raise BackendDown("embedding model 'broken' does not load: out of memory")

        worker.on_start = fail
    return worker


async def _needs(model: WorkerModel) -> WorkerNeeds:
    return WorkerNeeds(1_000_000, 1_000_000)


SCRIPTED_WORKERS = WorkerBuilder(_worker, _needs)


@asynccontextmanager
async def staged(
    settings: ApiSettings | None = None,
    *,
    is_stepped: bool = False,
    worker_builder: WorkerBuilder | None = None,
    **sections: Any,
) -> AsyncIterator[Stage]:
    """Starts a stage whose engines output HELLO, freely or step by step.

    `worker_builder` builds the workers of changes. `sections` are those of the YAML file. Checks at the end
    that nothing leaked.
    """
    generator = ScriptedGenerator(
        model=CHAT_MODEL,
        max_model_tokens=256,
        max_running=MAX_RUNNING,
        is_stepped=is_stepped,
        default=HELLO,
        has_tandem_scheduler="pool" in sections
        or isinstance(sections.get("scheduling", {}).get("engine"), dict),
    )
    embedder = ScriptedEmbedder(
        model=EMBED_MODEL, supported_dimensions=(4, 8), max_input_tokens=64, is_stepped=is_stepped
    )
    reranker = ScriptedEmbedder(model=RERANK_MODEL, dimension=2, max_input_tokens=64, is_stepped=is_stepped)
    config = parse({"models": MODELS, **sections})
    workspace = 4 * embedder.workspace_bytes
    moves = config.static_quota_reason() is None
    service = build_service(
        config,
        [generator],
        [embedder],
        rerankers=[reranker],
        workspace_bytes=workspace,
        device_memory=(lambda: ElasticMemory(generator.kv_bytes + workspace, generator.kv_bytes))
        if moves
        else None,
        worker_builder=worker_builder,
    )
    # Without settings they are those of the configuration, as in the server.
    app = create_app(service, None if settings is None else lambda: settings)
    # An unexpected exception is logged, returned as a 500 and raised again for uvicorn's log.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        started(service),
        httpx.AsyncClient(transport=transport, base_url="http://tandem.test") as http,
    ):
        stage = Stage(service, app, generator, embedder, reranker, http)
        yield stage
        await until(stage.is_clean)
        service.gate.dispatcher.ledger.check_integrity()


@asynccontextmanager
async def started(service: Service) -> AsyncIterator[None]:
    """Runs a service while its block runs."""
    await service.start()
    try:
        yield
    finally:
        await service.stop()


async def at_a_slow_pace(stage: Stage) -> None:
    """Lets all requests of a stepped stage output three tokens, one in 0.2 s.

    A request that would wait for N more tokens of another then expects to wait for 0.2 N seconds. If that is
    more than its TTFT, it preempts at once, and not in the last milliseconds, which a busy machine can miss.
    """
    for count in range(1, 4):
        stage.generator.allow()
        await asyncio.sleep(0.2)
        await until(
            lambda count=count: all(t.timeline.output_tokens >= count for t in stage.service.gate.tickets())
        )


async def until(claim: Callable[[], bool]) -> None:
    """Yields to the event loop until the claim holds; TimeoutError after five seconds."""
    async with asyncio.timeout(5):
        while not claim():  # noqa: ASYNC110 (others' state rings no bell)
            await asyncio.sleep(0)


class _Quiet(uvicorn.Server):
    capture_signals = nullcontext  # type: ignore[assignment]


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serves the application on a real socket; yields its base URL."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error", access_log=False)
    listener = config.bind_socket()
    listener.listen()
    server = _Quiet(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await serving


def events(answer: httpx.Response) -> list[str]:
    """The content of each server-sent event."""
    return [block.split("data: ", 1)[1] for block in answer.text.split("\n\n") if block]


async def listens(port: int) -> bool:
    """Whether this machine accepts connections at `port`."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
