"""Real vLLM and a real embedding worker in one pool: a burst takes LLM quota and returns it at its end.

The death of an engine leaves the quotas unchanged, and its successor gets them.
"""

import asyncio
import multiprocessing
import os
import signal
from dataclasses import dataclass, field

import pytest

from backends.device.kv_memory import ElasticMemory
from backends.embedding.client import WorkerEmbedder
from backends.vllm.client import VllmGenerator
from controlplane.config import parse
from controlplane.core.errors import BackendDown
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.runtime.timers import SchedulerTimer
from tests.engines import TINY_ARGUMENTS

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

CONFIG = parse(
    {
        "models": {"chat": {"model": "tandem/tiny-llama"}, "embeddings": [{"model": "tandem/minilm"}]},
        "pool": {"kv_allocator": "kvcached"},
        "classes": {
            # Late at once and never shed: the highest urgency.
            "burst": {"priority": 2, "e2e_ms": 1, "sheddable": False},
            "chat": {"priority": 1, "default": True, "sheddable": False},
        },
        "quota": {
            "llm": {"nominal": 0.8, "min": 0.3, "borrow": 0.0},
            "embedding": {"nominal": 0.2, "min": 0.1},
            "forecast": {"quantile": None},
        },
    }
)
BLOCKS, ANSWERS, TOKENS = 512, 24, 150
CALLER = Caller("tests")


@dataclass
class Ticks(SchedulerTimer):
    """Notifies a condition after each tick."""

    ticked: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        super().__init__()

    def schedule_periodic(self, seconds, work):
        async def work_and_notify():
            await work()
            async with self.ticked:
                self.ticked.notify_all()

        super().schedule_periodic(seconds, work_and_notify)

    async def until(self, holds) -> None:
        async with self.ticked, asyncio.timeout(120):
            await self.ticked.wait_for(holds)


@pytest.mark.slow
async def test_an_embedding_burst_takes_and_returns_the_engines_quota():
    generator = VllmGenerator(
        "tandem/tiny-llama",
        engine_arguments=TINY_ARGUMENTS | {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 16},
        scheduling=CONFIG.engine_options(),
    )
    embedder = WorkerEmbedder("tandem/minilm", threads=1, batch_tokens=512, max_input_tokens=64)
    ticks = Ticks()
    service = build_service(
        CONFIG, [generator], [embedder], workspace_bytes=0, ticks=ticks,
        device_memory=lambda: ElasticMemory(generator.kv_bytes, generator.kv_bytes),
    )  # fmt: skip
    # Other tests may keep their own engines running.
    others = set(multiprocessing.active_children())
    await service.start()
    (engine,) = set(multiprocessing.active_children()) - others
    try:
        await burst_beside_answers(service, generator, embedder, ticks)
        await killed_beside_ticks(service, generator, ticks, engine.pid)
    finally:
        await service.stop()


async def burst_beside_answers(service, generator, embedder, ticks):
    quotas, over, longest = service.quota_controller, 0, 0
    nominal, least = quotas.usable[Owner.LLM], quotas.pool.sharing.options.lowest
    # The least LLM quota depends on the measured memory of an embedding batch.
    half_way = (nominal + least) / 2
    assert least < half_way < nominal
    noted = generator.on_step

    def on_step(done):
        nonlocal over, longest
        noted(done)
        state = generator.state()
        over = over + 1 if state.used_bytes > state.use_ceiling_bytes else 0
        longest = max(longest, over)

    generator.on_step = on_step
    answers = [asyncio.create_task(chat(service, n)) for n in range(ANSWERS)]
    await ticks.until(lambda: generator.state().used_bytes > 0)
    calls = [asyncio.create_task(embed(service, embedder, n)) for n in range(30)]
    await ticks.until(lambda: generator.state().use_ceiling_bytes < half_way)
    assert all(len(rows) == 8 for rows in await asyncio.gather(*calls))
    assert await asyncio.gather(*answers) == [TOKENS] * ANSWERS
    await ticks.until(lambda: generator.state().use_ceiling_bytes == nominal)
    assert longest <= 2
    ledger = service.gate.dispatcher.ledger
    ledger.check_integrity()
    assert ledger.held(Owner.LLM) == ledger.held(Owner.EMBEDDING) == 0


async def killed_beside_ticks(service, generator, ticks, pid):
    usable, quotas = service.quota_controller.usable, service.gate.dispatcher.ledger.quota
    assert service.status.impaired() == {}
    await service.reconfiguration.change({"scheduling": {"engine": {"urgency": 0.25}}}, source="test")
    os.kill(pid, signal.SIGKILL)
    await ticks.until(lambda: service.status.impaired() == {"quotas": "backend_down"})
    assert {owner: quotas(owner) for owner in Owner} == usable == service.quota_controller.owned
    with pytest.raises(BackendDown):
        await service.check()
    await ticks.until(lambda: service._supervisors[0].rejection() is None and not service.status.impaired())
    await service.check()
    assert generator.state().quota_bytes == quotas(Owner.LLM) < generator.kv_bytes
    assert generator._engine.scheduler_client.options.urgency == 0.25
    assert await chat(service, 0) == TOKENS


async def chat(service, number):
    job = await service.intake.completion(
        RequestOrigin(f"a{number}", CALLER), "tandem/tiny-llama", [5 + number] * 40, max_tokens=TOKENS,
        sampling=Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    )  # fmt: skip
    answer = await service.gate.generate(job)
    return sum([len(delta.token_ids) async for delta in answer])


async def embed(service, embedder, number):
    texts = [f"{number} {line} " + "word " * 55 for line in range(8)]
    origin = RequestOrigin(f"e{number}", CALLER, RequestHints(service_class="burst"))
    job = await service.intake.embeddings(origin, embedder.model, texts)
    return (await service.gate.embed(job)).vectors
