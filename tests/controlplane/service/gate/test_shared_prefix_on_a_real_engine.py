"""Requests with a common prefix on a real engine whose cache holds them only if they share it."""

import asyncio

import pytest

from backends.vllm.client import VllmGenerator
from controlplane.config import parse
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.request_jobs import Caller, RequestOrigin
from tests.engines import BLOCK_TOKENS, TINY_ARGUMENTS

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

REQUESTS, PREFIX, OWN, OUTPUT = 40, 2_016, 5, 64
BLOCKS = 240


@pytest.mark.slow
async def test_nobody_is_rejected_in_a_cache_that_holds_them_by_sharing():
    needed_alone = -(-(PREFIX + OWN + OUTPUT) // BLOCK_TOKENS)
    assert needed_alone * REQUESTS > 10 * BLOCKS > needed_alone + 3 * REQUESTS
    config = parse(
        {
            "models": {"chat": {"model": "tandem/tiny-llama"}},
            "scheduling": {"engine": {}},
            # A minute, so that only memory could make a request late, on any machine.
            "classes": {"interactive": {"priority": 2, "ttft_ms": 60_000, "default": True}},
        }
    )
    arguments = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 48, "max_model_len": 2_112}
    generator = VllmGenerator(
        "tandem/tiny-llama",
        engine_arguments=TINY_ARGUMENTS | arguments | {"enable_prefix_caching": True},
        scheduling=config.engine_options(),
    )
    service = build_service(config, [generator], [], workspace_bytes=0)
    await service.start()
    try:
        assert generator.has_prefix_cache
        ledger, most = service.gate.dispatcher.ledger, 0
        noted = generator.on_step

        def on_step(done):
            nonlocal most
            if noted is not None:
                noted(done)
            state = generator.state()
            most = max(most, state.running)
            # Each block counts once, in the engine's rows and so in the leases.
            assert sum(state.held_bytes.values()) <= state.used_bytes <= state.total_bytes

        generator.on_step = on_step

        async def answer(number: int) -> tuple[int, int]:
            prompt = [300 + at % 1_000 for at in range(PREFIX)] + [1_400 + number] * OWN
            job = await service.intake.completion(
                RequestOrigin(str(number), Caller("tests")), "tandem/tiny-llama", prompt, max_tokens=OUTPUT,
                sampling=Sampling(max_tokens=OUTPUT, ignore_eos=True),
            )  # fmt: skip
            stream = await service.gate.generate(job)
            tokens = sum([len(delta.token_ids) async for delta in stream])
            return tokens, stream.ticket.cache_hit_tokens

        # `generate` raises Rejected if the gate rejects a request.
        found = await asyncio.gather(*map(answer, range(REQUESTS)))
        assert [tokens for tokens, _ in found] == [OUTPUT] * REQUESTS
        assert sum(cached == PREFIX for _, cached in found) >= REQUESTS - 1
        assert most > BLOCKS // needed_alone * 4
        assert generator.state().preemptions == 0
        newcomer = await answer(REQUESTS)
        assert newcomer == (OUTPUT, PREFIX)
        ledger.check_integrity()
        assert ledger.held(Owner.LLM) == 0
    finally:
        await service.stop()
