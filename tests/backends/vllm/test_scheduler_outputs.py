"""Repeated preemption changes no token, under every ordering, with and without async scheduling."""

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
from controlplane.core.engine_reports import EngineStep
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import Delta, Handoff, Sampling
from controlplane.core.slo import Slo
from controlplane.policy.engine.options import EngineOptions
from controlplane.policy.registry import ENGINE_POLICIES
from tests.engines import a_request, running_vllm, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="module")]

EVERY_ORDERING = sorted(ENGINE_POLICIES)
GREEDY = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
REQUESTS = 8
# A finished request holds 5 blocks, so about two fit at their end and four at their start.
TIGHT_BLOCKS = 11

# Longest time without a token of any request; a loaded machine may be slow.
SILENCE_SECONDS = 300
# At most a quarter of the actual length, so that blocks run out despite the look-ahead.
EXPECTED = LengthForecast((0.0, 1.0), (20.0, 30.0))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["tandem/tiny-llama", pytest.param("tandem/tiny-opt", marks=pytest.mark.slow)],
)
async def generator(request):
    async with running_vllm(
        request.param,
        scheduling=EngineOptions(),
        distributed_executor_backend="tests.overlap.Overlapping",
        # In 16 bits a token computed with its prompt differs by rounding from one computed uncontended, and
        # the two likeliest tokens of random weights are that close.
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
    """The engine with synchronous or asynchronous scheduling."""
    is_ahead = request.param.startswith("Async")
    assert await call_engine(generator, "overlap", is_ahead) == request.param
    yield generator
    await call_engine(generator, "overlap", False)


async def call_engine(generator: VllmGenerator, method: str = METHOD, *arguments: object) -> Any:
    """Calls a utility method in the engine's process; by default returns the scheduler's state in blocks."""
    return await generator._engine._llm.engine_core.call_utility_async(method, *(arguments or ("state",)))


async def answer(
    generator: VllmGenerator, prompt: list[int], guard: asyncio.Timeout | None = None
) -> list[int]:
    request = replace(
        a_request(prompt, GREEDY), slo=Slo(ttft=milliseconds(300)), arrival=Instant(time.monotonic_ns())
    )
    handoff = Handoff(forecast=EXPECTED)
    found: list[int] = []
    async with aclosing(generator.generate(request, prompt, GREEDY, handoff=handoff)) as deltas:
        async for delta in deltas:
            found += delta.token_ids
            if guard is not None:
                guard.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
    return found


async def answers(generator: VllmGenerator) -> list[list[int]]:
    """Outputs of all requests. Raises TimeoutError if no request gets a token for `SILENCE_SECONDS`."""
    prompts = [[11 + 7 * number + at % 13 for at in range(20 + 3 * number)] for number in range(REQUESTS)]
    async with asyncio.timeout(SILENCE_SECONDS) as guard:
        return await asyncio.gather(*(answer(generator, prompt, guard) for prompt in prompts))


async def after(tokens: int, deltas: AsyncIterator[Delta]) -> None:
    """Reads at least `tokens` more; a delta has several if the reader was slower than the engine."""
    read = 0
    while read < tokens:
        read += len((await anext(deltas)).token_ids)


async def test_greedy_outputs_are_unchanged_in_a_pool_that_is_far_too_small(overlapping, undisturbed):
    generator, size = overlapping, overlapping.geometry.bytes_per_block
    before = 0
    for ordering in EVERY_ORDERING:
        await generator.set_options({"ordering": ordering, "look_ahead": "none"})
        await generator.set_quota(TIGHT_BLOCKS * size)
        assert await answers(generator) == undisturbed, ordering
        state, engine = generator.state(), await call_engine(generator)
        assert state.preemptions >= before + 3, ordering
        before = state.preemptions
        assert (engine["used"], engine["running"], engine["waiting"], engine["malformed"]) == (0, 0, 0, 0)
        assert (state.quota_bytes, state.total_bytes) == (TIGHT_BLOCKS * size, generator.kv_bytes)
        await generator.set_quota(generator.kv_bytes)


async def test_the_state_has_the_blocks_of_each_request_and_the_ceded_bytes(generator):
    size = generator.geometry.bytes_per_block
    await generator.set_quota(20 * size)
    idle = generator.state()
    assert (idle.quota_bytes, idle.ceded_bytes) == (20 * size, generator.kv_bytes - 20 * size)
    prompt = list(range(30, 70))
    request = a_request(prompt, GREEDY)
    async with aclosing(generator.generate(request, prompt, GREEDY, handoff=Handoff())) as deltas:
        await after(20, deltas)
        generator.set_forecast(request.id, EXPECTED)
        await after(20, deltas)
        state = generator.state()
        # 40 prompt tokens and a little over 40 output tokens in blocks of 32.
        assert state.held_bytes == {request.id: 3 * size}
        assert (state.used_bytes, state.running) == (3 * size, 1)
        assert state.ceded_bytes == generator.kv_bytes - 20 * size
        assert state.pace is not None and state.pace.step > 0
    assert generator.state().held_bytes == {}
    await generator.set_quota(generator.kv_bytes)


async def test_steps_are_delayed_within_the_tpot_under_contention_and_outputs_are_unchanged(generator):
    prompt, tpot = list(range(40, 80)), milliseconds(100)
    request = replace(a_request(prompt, GREEDY), slo=Slo(tpot=tpot))
    uncontended = await answer(generator, prompt)
    steps: list[EngineStep] = []
    generator.on_step, before = steps.append, generator.state().waited
    generator.set_device_contention(is_shared=True)
    began = time.monotonic_ns()
    async with aclosing(generator.generate(request, prompt, GREEDY, handoff=Handoff())) as deltas:
        contended = tokens_of([delta async for delta in deltas])
    took = time.monotonic_ns() - began
    generator.set_device_contention(is_shared=False)
    generator.on_step = None
    assert contended == uncontended
    # The delay is reported separately from the duration of the steps.
    waited = generator.state().waited - before
    # How long depends on the speed of the machine: a lead of less than the longest recent step is not spent.
    assert 0 < sum(step.waited for step in steps) <= waited < took
    assert all(step.waited <= step.took for step in steps)


async def test_an_invalid_command_is_refused_and_leaves_the_engine_alive(generator):
    with pytest.raises(Refused, match="at least one block of"):
        await generator.set_quota(generator.geometry.bytes_per_block - 1)
    with pytest.raises(Refused, match="at most the cache's"):
        await generator.set_quota(2 * generator.kv_bytes)
    with pytest.raises(Refused, match="'speed': unknown"):
        await generator.set_options({"speed": 9})
    with pytest.raises(Exception, match="unknown; known are set_quota"):
        await generator._engine._llm.engine_core.call_utility_async(METHOD, "explode")
    assert (await call_engine(generator))["running"] == 0
