"""A shrinking LLM quota under backlog on real vLLM: it converges as answers end, and preempts none."""

import asyncio

import pytest

from backends.device.kv_memory import ElasticMemory
from backends.testing.scripted import ScriptedEmbedder
from backends.vllm.client import VllmGenerator
from controlplane.config import parse
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, RequestOrigin
from controlplane.service.runtime.timers import LoopClock
from tests.controlplane.service.memory.test_quota_controller import NoTicks
from tests.engines import TINY_ARGUMENTS

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.slow]

CONFIG = {
    "models": {"chat": {"model": "tandem/tiny-llama"}, "embeddings": [{"model": "tandem/minilm"}]},
    "pool": {"kv_allocator": "kvcached"},
    # `srmt` would preempt larger requests of the same priority for urgent ones, whatever the quota.
    "scheduling": {"engine": {"ordering": "fcfs"}},
    "classes": {"chat": {"priority": 1, "default": True, "sheddable": False}},
    "quota": {
        "llm": {"nominal": 0.9, "min": 0.3, "borrow": 0.0},
        "embedding": {"nominal": 0.1, "min": 0.05},
        "forecast": {"quantile": None},
    },
}
BLOCKS, ANSWERS, PROMPT, TICK_SECONDS = 256, 90, 120, 0.05
LONGEST = 200


async def test_a_shrinking_quota_converges_under_backlog_without_preemption():
    config = parse(CONFIG)
    generator = VllmGenerator(
        "tandem/tiny-llama",
        engine_arguments=TINY_ARGUMENTS | {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 48},
        scheduling=config.engine_options(),
    )
    embedder = ScriptedEmbedder(batch_tokens=4_096, max_input_tokens=64, bytes_per_token=4_096)
    service = build_service(
        config, [generator], [embedder], workspace_bytes=0, ticks=NoTicks(), clock=LoopClock(),
        device_memory=lambda: ElasticMemory(generator.kv_bytes, generator.kv_bytes),
    )  # fmt: skip
    await service.start()
    try:
        async with asyncio.timeout(300):
            await shrink(service, generator, embedder)
    finally:
        await service.stop()


async def shrink(service, generator, embedder):
    quotas, pool, steps, overlaps = service.quota_controller, generator.kv_bytes, 0, []
    noted = generator.on_step

    def on_step(done):
        nonlocal steps
        noted(done)
        steps += 1
        # The pool is as large as the cache, so the workspace consists of ceded blocks.
        if generator.state().ceded_bytes < embedder.budget_bytes:
            overlaps.append((generator.state(), embedder.budget_bytes))

    async def tick(llm):
        quotas.owned = {Owner.LLM: llm, Owner.EMBEDDING: pool - llm}
        quotas._target, quotas._moved_at = llm, None
        await quotas.tick_now()
        assert service.status.impaired() == {}

    async def tick_until(llm, holds):
        while not holds(generator.state()):
            await asyncio.sleep(TICK_SECONDS)
            await tick(llm)

    block = generator.geometry.bytes_per_block
    large, small = (int(share * pool) // block * block for share in (0.9, 0.6))
    generator.on_step = on_step
    answers = [asyncio.create_task(chat(service, number)) for number in range(ANSWERS)]
    await tick_until(large, lambda state: state.used_bytes > 0.72 * pool)
    began, preemptions = steps, generator.state().preemptions
    await tick_until(small, lambda state: state.use_ceiling_bytes == small)
    # Within the steps that the answers running at its begin need to end.
    assert steps - began <= LONGEST
    assert generator.state().used_bytes <= small
    assert generator.state().waiting > 0
    assert embedder.budget_bytes == pool - small
    assert generator.state().preemptions == preemptions
    await tick_until(large, lambda state: state.use_ceiling_bytes == large)
    assert await asyncio.gather(*answers) == [length(number) for number in range(ANSWERS)]
    assert overlaps == []
    service.gate.dispatcher.ledger.check_integrity()


def length(number):
    return LONGEST - 10 * (number % 13)


async def chat(service, number):
    tokens = length(number)
    job = await service.intake.completion(
        RequestOrigin(f"a{number}", Caller("tests")), "tandem/tiny-llama", [5 + number] * PROMPT,
        max_tokens=tokens, sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )  # fmt: skip
    answer = await service.gate.generate(job)
    return sum([len(delta.token_ids) async for delta in answer])
