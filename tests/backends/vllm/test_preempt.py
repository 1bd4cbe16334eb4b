"""Preemption by the gate on a real engine: abort, then resume from the tokens generated so far."""

import pytest

from backends.vllm.client import VllmGenerator
from controlplane.core.errors import Refused
from controlplane.core.generation import Delta, Sampling
from tests.engines import a_request, complete, text_of, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]

GREEDY = Sampling(max_tokens=96, temperature=0.0, ignore_eos=True)


async def until_preempted(tiny_vllm: VllmGenerator, prompt: list[int], after: int) -> list[Delta]:
    request, seen = a_request(prompt, GREEDY), []
    async for delta in tiny_vllm.generate(request, prompt, GREEDY):
        seen.append(delta)
        # A delta has several tokens if its reader was slower than the engine.
        if len(tokens_of(seen)) >= after:
            await tiny_vllm.preempt(request.id)
    return seen


async def test_a_preempted_request_delivers_all_its_tokens_and_ends_as_preempted(tiny_vllm: VllmGenerator):
    prompt = await tiny_vllm.tokenize("Once upon a time there was a queue.")
    undisturbed = tokens_of(await complete(tiny_vllm, prompt, GREEDY))
    seen = await until_preempted(tiny_vllm, prompt, after=10)
    assert seen[-1].finish_reason == "preempted"
    cut = tokens_of(seen)
    assert 10 <= len(cut) < GREEDY.max_tokens
    assert cut == undisturbed[: len(cut)]


async def test_preempting_a_finished_request_does_nothing(tiny_vllm: VllmGenerator):
    prompt = await tiny_vllm.tokenize("short")
    request = a_request(prompt, GREEDY)
    deltas = [delta async for delta in tiny_vllm.generate(request, prompt, GREEDY)]
    await tiny_vllm.preempt(request.id)
    assert deltas[-1].finish_reason == "length"
    assert text_of(deltas)


async def test_an_engine_with_vllms_own_scheduler_refuses_commands(tiny_vllm: VllmGenerator):
    assert not tiny_vllm.has_tandem_scheduler
    with pytest.raises(Refused, match="vLLM's own scheduler; set scheduling"):
        await tiny_vllm.set_quota(tiny_vllm.kv_bytes)
    with pytest.raises(Refused, match="vLLM's own scheduler"):
        await tiny_vllm.set_options({"ordering": "edf"})
