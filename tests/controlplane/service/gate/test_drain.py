"""A drain rejects waiting and new requests, and evicts those that outlast the grace."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.decision import Reason
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read


def engine(*, max_running: int) -> ScriptedGenerator:
    return ScriptedGenerator(max_running=max_running, prefill_seconds=0.1, token_seconds=0.1)


def test_drain_rejects_waiting_requests_and_lets_running_ones_finish(bench):
    async def scenario(b):
        running = await b.ask(max_tokens=5)
        reading = asyncio.create_task(read(running))
        waiting = asyncio.create_task(b.ask())
        await b.generator.until_runs(1)
        await b.service.drain()
        assert reading.done() and await reading == "word " * 5
        with pytest.raises(Rejected) as caught:
            await waiting
        assert caught.value.reject.reason is Reason.SHUTTING_DOWN
        with pytest.raises(Rejected):
            await b.ask()

    b = bench(scenario, generator=engine(max_running=1), admission={"engine_queue": 0})
    assert sorted(b.outcomes) == ["met", "rejected", "rejected"]


def test_a_generation_that_outlasts_the_drain_is_evicted(bench):
    async def scenario(b):
        whole = asyncio.create_task(read(await b.ask(max_tokens=1_000)))
        begun = await b.ask(max_tokens=1_000)
        await anext(begun)
        start = asyncio.get_running_loop().time()
        await b.service.drain()
        assert asyncio.get_running_loop().time() - start == pytest.approx(1.0)
        for answer in (whole, read(begun)):
            with pytest.raises(Rejected) as caught:
                await answer
            assert caught.value.reject.reason is Reason.SHUTTING_DOWN

    b = bench(scenario, generator=engine(max_running=2), server={"drain_ms": 1_000})
    assert b.outcomes == ["evicted", "evicted"]


def test_a_preempted_generation_resumes_within_the_drain(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = asyncio.create_task(read(await b.ask(max_tokens=60, service_class="batch")))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        urgent = await b.ask(max_tokens=2, service_class="interactive")
        assert urgent.ticket.decision == "ADMIT_WITH_PREEMPTION"
        reading = asyncio.create_task(read(urgent))
        await b.service.drain()
        assert [(await one).count("word") for one in (reading, victim)] == [2, 60]

    b = bench(scenario, generator=engine(max_running=1), admission={"engine_queue": 0})
    assert b.outcomes == ["met"] * 3


def test_a_request_refused_while_its_victim_leaves_never_starts(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = await b.ask(max_tokens=60, service_class="batch")
        await anext(victim)
        urgent = await b.ask(max_tokens=2, service_class="interactive")
        assert urgent.ticket.decision == "ADMIT_WITH_PREEMPTION"
        reading = asyncio.create_task(read(urgent))
        await b.service.drain(0)
        # The scripted engine ends the preemption only once the client has read the pending deltas.
        for answer in (read(victim), reading):
            with pytest.raises(Rejected):
                await answer
        assert len(b.generator.runs) == 2

    b = bench(scenario, generator=engine(max_running=1), admission={"engine_queue": 0})
    assert b.outcomes == ["met", "evicted", "evicted"]


def test_an_evicted_request_gets_rejected_even_if_its_engine_dies_at_once(bench):
    async def scenario(b):
        reading = asyncio.create_task(read(await b.ask(max_tokens=60)))
        await b.generator.until_runs(1)
        await b.service.drain(0)
        b.generator.die()
        with pytest.raises(Rejected):
            await reading

    assert bench(scenario, generator=engine(max_running=1)).outcomes == ["evicted"]


def test_an_embedding_that_outlasts_the_drain_is_evicted(bench):
    async def scenario(b):
        computing = asyncio.create_task(b.embed("one"))
        await b.embedder.until_runs(1)
        await b.service.drain()
        with pytest.raises(Rejected) as caught:
            await computing
        assert caught.value.reject.reason is Reason.SHUTTING_DOWN
        assert len(b.embedder.aborted) == 1

    slow = ScriptedEmbedder(call_seconds=60)
    assert bench(scenario, embedder=slow, server={"drain_ms": 1_000}).outcomes == ["evicted"]


def test_an_embedding_finishes_within_the_drain(bench):
    async def scenario(b):
        computing = asyncio.create_task(b.embed("one"))
        await b.embedder.until_runs(1)
        await b.service.drain()
        assert len((await computing).vectors) == 1

    quick = ScriptedEmbedder(call_seconds=0.5)
    assert bench(scenario, embedder=quick, server={"drain_ms": 1_000}).outcomes == ["met"]


def test_a_client_that_leaves_as_the_drain_ends_is_counted_once(bench):
    async def scenario(b):
        computing = asyncio.create_task(b.embed("one"))
        await b.embedder.until_runs(1)
        await b.service.drain()
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing

    slow = ScriptedEmbedder(call_seconds=60)
    assert bench(scenario, embedder=slow, server={"drain_ms": 1_000}).outcomes == ["evicted"]
