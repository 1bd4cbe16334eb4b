"""Workers that are scripted, in virtual time, and a service that changes them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from backends.device.kv_memory import ElasticMemory
from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import LoopTimers, run
from controlplane.config import Config, parse
from controlplane.config.models_section import EmbeddingModel, WorkerModel
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.gate.gate import Embedded
from controlplane.service.reconfiguration import AppliedChange
from controlplane.service.request_jobs import Caller, RequestOrigin, TextPairs
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service
from controlplane.service.worker_replacement import WorkerBuilder, WorkerNeeds

KIB = 1_024
WEIGHTS = 100 * KIB
TOKENS = 200
"""Of the largest pass; a token takes 1 KiB."""
QUOTA = 1_000 * KIB
ONE = {"embeddings": [{"model": "a"}]}
TWO = {"embeddings": [{"model": "a"}, {"model": "b"}]}
MOVING = {
    "models": {"chat": {"model": "chat"}, **ONE},
    "pool": {"kv_allocator": "kvcached"},
    "quota": {
        "llm": {"nominal": 0.5, "min": 0.2, "borrow": 0.2, "lend": 0.2},
        "embedding": {"nominal": 0.5, "min": 0.2, "borrow": 0.2, "lend": 0.2},
    },
}


class CountingEmbedder(ScriptedEmbedder):
    """Takes a second to load, and knows whether it was stopped."""

    is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True
        await super().stop()


@dataclass
class Bench:
    """A service whose workers are scripted; `built` are those of all changes."""

    service: Service = field(init=False)
    built: list[CountingEmbedder] = field(default_factory=list)
    load: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(1.0)
    batch_tokens: int = TOKENS

    def worker(self, config: Config, model: WorkerModel) -> CountingEmbedder:
        found = worker(model, self.batch_tokens)
        found.on_start = self.load
        self.built.append(found)
        return found

    async def put(self, models: dict[str, Any], **options: Any) -> AppliedChange:
        content = {**document(self.service.config), "models": models}
        return await self.service.reconfiguration.change(content, source="test", **options)

    async def embed(self, name: str, model: str, *, words: int = 10) -> Embedded:
        origin = RequestOrigin(name, Caller("t"))
        job = await self.service.intake.embeddings(origin, model, ["x" * words])
        return await self.service.gate.embed(job)

    async def score(self, name: str, model: str) -> Embedded:
        texts = TextPairs(["q"], ["d" * 5, "e" * 7])
        job = await self.service.intake.pairs.job(RequestOrigin(name, Caller("t")), model, texts, None)
        return await self.service.gate.embed(job)

    @property
    def quota(self) -> int:
        return self.service.status.ledger.quota(Owner.EMBEDDING)


def document(config: Config) -> dict[str, Any]:
    """The sections of a configuration other than `models`."""
    return {key: value for key, value in MOVING.items() if key != "models"} if config.models.chat else {}


def worker(model: WorkerModel, batch_tokens: int = TOKENS) -> CountingEmbedder:
    """The worker of a model; an embedding model's `dimensions` are the length of its vectors."""
    is_embedding = isinstance(model, EmbeddingModel)
    return CountingEmbedder(
        model=model.served_name,
        dimension=(model.dimensions or (8,))[0] if is_embedding else 2,
        max_input_tokens=20,
        batch_tokens=batch_tokens,
        bytes_per_token=KIB,
        max_running=4,
        call_seconds=0.02,
    )


async def needs(model: WorkerModel) -> WorkerNeeds:
    return WorkerNeeds(WEIGHTS, TOKENS * KIB)


def play(
    scenario: Callable[[Bench], Awaitable[None]], content: dict[str, Any] | None = None, *, quota: int = QUOTA
) -> None:
    """Runs a scenario, and checks at its end that no memory is held and that each worker left is right."""

    async def main() -> None:
        config = parse(content or {"models": ONE})
        bench = Bench()
        chat = (
            []
            if config.models.chat is None
            else [
                ScriptedGenerator(
                    model="chat",
                    kv_bytes=QUOTA,
                    max_model_tokens=100,
                    has_tandem_scheduler=True,
                    token_seconds=0.01,
                )
            ]
        )
        first = [worker(model) for model in config.models.embeddings]
        service = bench.service = build_service(
            config,
            chat,
            first,
            rerankers=[worker(model) for model in config.models.rerankers],
            workspace_bytes=quota,
            clock=LoopClock(),
            ticks=LoopTimers(),
            device_memory=(lambda: ElasticMemory(2 * QUOTA, QUOTA)) if chat else None,
            worker_builder=WorkerBuilder(bench.worker, needs),
        )
        await service.start()
        bench.built += first
        await scenario(bench)
        ledger = service.status.ledger
        ledger.check_integrity()
        assert not service.gate.tickets()
        assert ledger.held(Owner.EMBEDDING) == 0
        await service.stop()
        assert all(each.is_stopped and not each.live for each in bench.built)

    run(main())
