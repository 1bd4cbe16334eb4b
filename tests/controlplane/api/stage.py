"""A real service behind the door, its two engines played from a script."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI

from controlplane.api.app import create_app
from controlplane.api.settings import ApiSettings
from controlplane.config import parse
from controlplane.core.clock import Instant
from controlplane.core.geometry import KvGeometry
from controlplane.core.ports import BackendDown, ChatPrompt, Delta, EngineState, Sampling, Vectors
from controlplane.core.request import Request
from controlplane.service.assembly import Service

CHAT_MODEL = "chat-model"
EMBED_MODEL = "embed-model"
CONTEXT_TOKENS = 256
HELLO = (
    Delta(0, "Hello", (11,)),
    Delta(0, " wörld\u2028", (12, 13)),
    Delta(0, "!", (14,), "stop"),
)


@dataclass
class Script:
    """What the chat engine says to every request, and where it stops, fails or waits."""

    deltas: Sequence[Delta] = HELLO
    fail_before: dict[int, Exception] = field(default_factory=dict)
    hold_before: dict[int, asyncio.Event] = field(default_factory=dict)


class PlayedGenerator:
    """One token a byte of prompt."""

    model = CHAT_MODEL
    geometry = KvGeometry(elements_per_token=64, bytes_per_element=2, block_tokens=16)
    kv_bytes = geometry.bytes_per_block * 256
    max_model_tokens = CONTEXT_TOKENS
    max_running = 4

    def __init__(self) -> None:
        self.script = Script()
        self.down: str | None = None
        self.asked: list[tuple[Request, list[int], Sampling, ChatPrompt | None]] = []
        self.live: set[str] = set()
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        if self.down:
            raise BackendDown(self.down)

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        return [token for message in prompt.messages for token in str(message.get("content")).encode()]

    async def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    async def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
    ) -> AsyncGenerator[Delta]:
        await self.check()
        self.asked.append((request, list(prompt), sampling, chat))
        self.live.add(request.id)
        self.begun.set()
        script = self.script
        try:
            for position, delta in enumerate(script.deltas):
                if position in script.hold_before:
                    await script.hold_before[position].wait()
                if position in script.fail_before:
                    raise script.fail_before[position]
                yield delta
        finally:
            self.live.discard(request.id)
            self.ended.set()

    async def preempt(self, request_id: str) -> None:
        raise NotImplementedError(f"{request_id}: these tests preempt nothing")

    def state(self) -> EngineState:
        return EngineState(0, self.kv_bytes, len(self.live), 0, 0)


class PlayedEmbedder:
    """Vector of an input: its length, then its first tokens."""

    model = EMBED_MODEL
    dimension = 8
    supported_dimensions = (4, 8)
    max_input_tokens = 64
    workspace_bytes = 1 << 16
    max_running = 4

    def __init__(self) -> None:
        self.down: str | None = None
        self.failure: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.live: set[str] = set()
        self.begun = asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        if self.down:
            raise BackendDown(self.down)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        return min(self.workspace_bytes, 64 * sum(token_counts))

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        await self.check()
        self.live.add(request.id)
        self.begun.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
            if self.failure is not None:
                raise self.failure
            return np.array([self.vector(ids) for ids in inputs], dtype=np.float32)
        finally:
            self.live.discard(request.id)

    def vector(self, ids: Sequence[int]) -> list[float]:
        return [float(len(ids)), *map(float, ids[:7]), *[0.0] * (7 - len(ids))]


@dataclass
class Stage:
    """`http` speaks to the application in this process, without a socket."""

    service: Service
    app: FastAPI
    generator: PlayedGenerator
    embedder: PlayedEmbedder
    http: httpx.AsyncClient

    def is_clean(self) -> bool:
        """Whether nothing is held, nobody waits and no engine works."""
        owners = self.service.state()["owners"].values()  # type: ignore[attr-defined]
        held = any(owner["held_bytes"] or owner["running"] or owner["waiting"] for owner in owners)
        tickets = self.service.dispatcher.tickets()
        return not (held or tickets or self.generator.live or self.embedder.live)


@asynccontextmanager
async def staged(settings: ApiSettings | None = None, **sections: Any) -> AsyncIterator[Stage]:
    """`sections` of the operator's YAML besides the models. Leaves with a check that nothing leaked."""
    models = {"chat": {"model": CHAT_MODEL}, "embeddings": [{"model": EMBED_MODEL}]}
    generator, embedder = PlayedGenerator(), PlayedEmbedder()
    config = parse({"models": models, **sections})
    service = Service(config, [generator], [embedder], workspace_bytes=4 * embedder.workspace_bytes)
    app = create_app(service, settings or ApiSettings())
    # A failure that nobody expected is logged, told as a 500 and raised again for the server's own log.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://door") as http,
    ):
        stage = Stage(service, app, generator, embedder, http)
        yield stage
        await until(stage.is_clean)
        service.dispatcher.ledger.check_integrity()


async def until(claim: Callable[[], bool]) -> None:
    """Lets everything else run until the claim holds; TimeoutError after five seconds."""
    async with asyncio.timeout(5):
        while not claim():  # noqa: ASYNC110 (others' state rings no bell)
            await asyncio.sleep(0)


class _Quiet(uvicorn.Server):
    capture_signals = nullcontext  # type: ignore[assignment]


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """The application behind a real socket; yields its base URL."""
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


async def events(answer: httpx.Response) -> list[str]:
    """The content of each server-sent event of a streamed answer."""
    async with aclosing(answer):
        text = (await answer.aread()).decode()
    return [block.split("data: ", 1)[1] for block in text.split("\n\n") if block]
