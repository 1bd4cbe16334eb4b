"""Real vLLM, real weights: being preempted again and again changes no token, whoever orders the steps, and
whether or not the next step is planned while the last one runs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from backends.vllm.client import VllmGenerator
from backends.vllm.plugin.rpc import METHOD
from controlplane.core.clock import Instant, milliseconds
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Delta, Handoff, Sampling
from controlplane.core.ports import EngineStep
from controlplane.core.slo import Slo
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import ENGINE_POLICIES
from tests.engines import a_request, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

EVERY_ORDERING = sorted(ENGINE_POLICIES)
GREEDY = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
REQUESTS = 8
# Each of them ends with 5 blocks, so about two fit at their end and four at their start.
TIGHT_BLOCKS = 11

# A crowded machine may be slow at everything; but the next token of somebody always comes.
SILENCE_SECONDS = 300
# A quarter of what they take or less, so that the plans are wrong: also who looks ahead runs out of blocks.
EXPECTED = LengthForecast((0.0, 1.0), (20.0, 30.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tandem/tiny-llama", "tandem/tiny-opt"])
async def generator(request):
    async with running_vllm(
        request.param,
        scheduling=EngineOptions(),
        distributed_executor_backend="tests.overlap.Overlapping",
        # In 16 bits a token computed with its prompt differs from one computed alone by a rounding, and
        # the likeliest two of random weights are that close.
        dtype="float32",
        # Recomputing everything is the harder case.
        enable_prefix_caching=False,
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(generator):
    found = await answers(generator)
    assert generator.state().preemptions == 0
    return found


@pytest_asyncio.fixture(loop_scope="module", params=["TandemScheduler", "AsyncTandemScheduler"])
async def overlapping(generator, undisturbed, request):
    """The engine, which from now on waits for each step or does not."""
    is_ahead = request.param.startswith("Async")
    assert await told(generator, "overlap", is_ahead) == request.param
    yield generator
    await told(generator, "overlap", False)


async def told(generator: VllmGenerator, method: str = METHOD, *arguments: object) -> Any:
    """What the engine's process itself says, where the port says it in bytes or not at all."""
    return await generator._engine._llm.engine_core.call_utility_async(method, *(arguments or ("state",)))


async def answer(
    generator: VllmGenerator, prompt: list[int], guard: asyncio.Timeout | None = None
) -> list[int]:
    request = replace(
        a_request(prompt, GREEDY), slo=Slo(ttft=milliseconds(300)), arrival=Instant(time.monotonic_ns())
    )
    standing = Handoff(forecast=EXPECTED)
    found: list[int] = []
    async with aclosing(generator.generate(request, prompt, GREEDY, standing=standing)) as deltas:
        async for delta in deltas:
            found += delta.token_ids
            if guard is not None:
                guard.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
    return found


async def answers(generator: VllmGenerator) -> list[list[int]]:
    """Raises TimeoutError when nobody gets a token any more."""
    prompts = [[11 + 7 * number + at % 13 for at in range(20 + 3 * number)] for number in range(REQUESTS)]
    async with asyncio.timeout(SILENCE_SECONDS) as guard:
        return await asyncio.gather(*(answer(generator, prompt, guard) for prompt in prompts))


async def after(tokens: int, deltas: AsyncIterator[Delta]) -> None:
    """Reads on by so many tokens; a delta brings several when the reader was slower than the engine."""
    read = 0
    while read < tokens:
        read += len((await anext(deltas)).token_ids)


async def test_greedy_answers_survive_a_pool_that_is_far_too_small(overlapping, undisturbed):
    generator, size = overlapping, overlapping.geometry.bytes_per_block
    before = 0
    for ordering in EVERY_ORDERING:
        await generator.set_options({"ordering": ordering, "look_ahead": "nobody"})
        await generator.set_quota(TIGHT_BLOCKS * size)
        assert await answers(generator) == undisturbed, ordering
        state, inside = generator.state(), await told(generator)
        assert state.preemptions >= before + 3, ordering
        before = state.preemptions
        assert (inside["used"], inside["running"], inside["waiting"], inside["malformed"]) == (0, 0, 0, 0)
        assert (state.quota_bytes, state.total_bytes) == (TIGHT_BLOCKS * size, generator.kv_bytes)
        await generator.set_quota(generator.kv_bytes)


async def test_the_gate_sees_what_each_request_holds_and_what_may_be_lent(generator):
    size = generator.geometry.bytes_per_block
    await generator.set_quota(20 * size)
    idle = generator.state()
    assert (idle.quota_bytes, idle.ceded_bytes) == (20 * size, generator.kv_bytes - 20 * size)
    prompt = list(range(30, 70))
    request = a_request(prompt, GREEDY)
    async with aclosing(generator.generate(request, prompt, GREEDY, standing=Handoff())) as deltas:
        await after(20, deltas)
        generator.set_forecast(request.id, EXPECTED)
        await after(20, deltas)
        state = generator.state()
        # 40 of the prompt and a little over 40 of the answer in blocks of 32.
        assert state.held_bytes == {request.id: 3 * size}
        assert (state.used_bytes, state.running) == (3 * size, 1)
        assert state.ceded_bytes == generator.kv_bytes - 20 * size
        assert state.pace is not None and state.pace.step > 0
    assert generator.state().held_bytes == {}
    await generator.set_quota(generator.kv_bytes)


async def test_an_answer_beside_embeddings_takes_of_its_promise_and_loses_no_token(generator):
    prompt, promised = list(range(40, 80)), milliseconds(20)
    request = replace(a_request(prompt, GREEDY), slo=Slo(tpot=promised))
    alone = await answer(generator, prompt)
    steps: list[EngineStep] = []
    generator.on_step, before = steps.append, generator.state().waited
    generator.set_device_contention(is_shared=True)
    began = time.monotonic_ns()
    async with aclosing(generator.generate(request, prompt, GREEDY, standing=Handoff())) as deltas:
        beside = tokens_of([delta async for delta in deltas])
    took = time.monotonic_ns() - began
    generator.set_device_contention(is_shared=False)
    generator.on_step = None
    assert beside == alone
    # Nothing is waited for before the first token is known.
    assert took >= (len(beside) - 5) * promised * EngineOptions().decode_pace
    # What it waited is told apart: the steps alone are no slower than they were.
    waited = generator.state().waited - before
    assert 0.3 * took < sum(step.waited for step in steps) <= waited < took
    assert all(step.waited <= step.took for step in steps)


async def test_an_order_that_makes_no_sense_is_refused_and_leaves_the_engine_alive(generator):
    with pytest.raises(Refused, match="at least one block of"):
        await generator.set_quota(generator.geometry.bytes_per_block - 1)
    with pytest.raises(Refused, match="at most the cache's"):
        await generator.set_quota(2 * generator.kv_bytes)
    with pytest.raises(Refused, match="'speed': unknown"):
        await generator.set_options({"speed": 9})
    with pytest.raises(Exception, match="unknown; known are set_quota"):
        await generator._engine._llm.engine_core.call_utility_async(METHOD, "explode")
    assert (await told(generator))["running"] == 0
