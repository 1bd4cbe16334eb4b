"""A request that waited and leaves the queue, and one that is evicted, let others start at once."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.decision import Reason
from controlplane.core.request import Owner
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read


def no_memory_for_a_second_large_request(b):
    """A request runs for 32 s; beside it there is memory for 49 of 160 tokens."""
    quota = 160 * b.generator.geometry.bytes_per_token
    b.service.gate.dispatcher.ledger.set_quota(Owner.LLM, quota)
    return b.ask("x" * 16, max_tokens=80)


MAX_TOKENS = {"admission": {"length_predictor": "max-tokens"}, "scheduling": {"ordering": "fcfs"}}


def slow(**options):
    return ScriptedGenerator(prefill_seconds=0.4, token_seconds=0.4, **options)


async def asked_after(b, seconds, prompt, max_tokens):
    await asyncio.sleep(seconds)
    return await b.ask(prompt, max_tokens=max_tokens)


def test_a_blocked_head_that_leaves_lets_those_behind_it_start(bench):
    async def scenario(b):
        running = asyncio.create_task(read(await no_memory_for_a_second_large_request(b)))
        large = asyncio.create_task(b.ask("x" * 64, max_tokens=64))
        small = asyncio.create_task(asked_after(b, 1.0, "x" * 8, 8))
        await asyncio.sleep(1.5)
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 2
        await asyncio.sleep(0.5)
        large.cancel()
        answer = await small
        assert answer.ticket.queue_ms == pytest.approx(1_000)
        await asyncio.gather(running, read(answer))

    assert bench(scenario, generator=slow(), **MAX_TOKENS).outcomes == ["aborted", "met", "met"]


def test_a_blocked_head_whose_wait_ends_lets_those_behind_it_start(bench):
    async def scenario(b):
        running = asyncio.create_task(read(await no_memory_for_a_second_large_request(b)))
        large = asyncio.create_task(b.ask("x" * 64, max_tokens=64))
        small = asyncio.create_task(asked_after(b, 1.0, "x" * 8, 8))
        with pytest.raises(Rejected) as caught:
            await large
        assert caught.value.reject.reason is Reason.QUEUE_TIMEOUT
        answer = await small
        assert answer.ticket.queue_ms == pytest.approx(1_000)
        await asyncio.gather(running, read(answer))

    sections = {**MAX_TOKENS, "admission": {"length_predictor": "max-tokens", "max_wait_ms": 2_000}}
    assert bench(scenario, generator=slow(), **sections).outcomes == ["rejected", "met", "met"]


def test_a_forwarded_request_that_is_evicted_gives_its_place_to_one_that_waits(bench):
    """The engine runs one request and does not start the second within `max_wait_ms`."""

    async def scenario(b):
        running = asyncio.create_task(read(await b.ask(max_tokens=30)))
        forwarded = asyncio.create_task(read(await b.ask(max_tokens=1)))
        third = asyncio.create_task(asked_after(b, 1.0, "hello", 1))
        answer = await third
        assert answer.ticket.queue_ms == pytest.approx(1_000)
        await answer.aclose()
        await running
        with pytest.raises(Rejected):
            await forwarded

    generator = slow(has_tandem_scheduler=True, max_running=1)
    sections = {"scheduling": {"engine": {}}, "admission": {"engine_queue": 1, "max_wait_ms": 2_000}}
    assert bench(scenario, generator=generator, **sections).outcomes == ["evicted", "aborted", "met"]
