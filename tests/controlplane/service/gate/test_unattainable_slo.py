"""A request that would be late even alone is rejected only if it would also wait."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.clock import milliseconds
from controlplane.core.decision import Reason
from controlplane.core.pool_view import Pace
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read

GATE = {"admission": {"engine_queue": 0, "length_predictor": "max-tokens"}}
ENGINE = {"scheduling": {"engine": {"ordering": "srmt"}}, "admission": {"length_predictor": "max-tokens"}}


@pytest.fixture(params=["gate", "engine"])
def played(request, bench):
    """Runs a scenario on an engine with one slot and a known step rate."""
    has_tandem_scheduler = request.param == "engine"
    engine = ScriptedGenerator(
        max_running=1, prefill_seconds=0.1, token_seconds=0.05, has_tandem_scheduler=has_tandem_scheduler
    )

    def play(scenario):
        async def known(b):
            b.generator.pace = Pace(milliseconds(50), milliseconds(20))
            assert await read(await b.ask()) == "word " * 4
            await scenario(b)

        return bench(known, generator=engine, **(ENGINE if has_tandem_scheduler else GATE))

    return play


@pytest.mark.parametrize("objective", [{"ttft_ms": 1}, {"e2e_ms": 2}])
def test_a_request_late_even_alone_is_served_if_none_is_ahead(played, objective):
    async def scenario(b):
        for _ in range(2):
            assert await read(await b.ask(service_class="interactive", **objective)) == "word " * 4

    assert played(scenario).outcomes == ["met", "late", "late"]


def test_a_request_late_even_alone_is_rejected_if_it_would_also_wait(played):
    async def scenario(b):
        running = asyncio.create_task(read(await b.ask(max_tokens=100)))
        waiting = asyncio.create_task(b.ask(max_tokens=100))
        await asyncio.sleep(0.5)
        with pytest.raises(Rejected) as caught:
            await b.ask(max_tokens=200, service_class="interactive", ttft_ms=1)
        assert caught.value.reject.reason is Reason.SLO_UNATTAINABLE
        await running
        await read(await waiting)

    assert played(scenario).outcomes == ["met", "rejected", "met", "met"]


async def embed(b) -> None:
    await b.embed("x" * 99, service_class="interactive", e2e_ms=1)


def test_embeddings_follow_the_same_rule(bench):
    async def scenario(b):
        for _ in range(2):
            await embed(b)
        first = asyncio.create_task(embed(b))
        await b.embedder.until_runs(3)
        with pytest.raises(Rejected):
            await embed(b)
        await first

    slow = ScriptedEmbedder(token_seconds=0.01)
    assert bench(scenario, embedder=slow).outcomes == ["late", "late", "rejected", "late"]


def test_an_embedding_is_rejected_while_generations_run(bench):
    """Each kind delays the other, so the embedding is not alone."""

    async def scenario(b):
        await embed(b)
        answer = await b.ask(max_tokens=50)
        with pytest.raises(Rejected):
            await embed(b)
        await read(answer)
        await embed(b)

    slow = ScriptedEmbedder(token_seconds=0.01)
    assert bench(scenario, embedder=slow).outcomes == ["late", "rejected", "met", "late"]


@pytest.mark.parametrize("explore", [0.0, 0.1])
def test_explored_requests_are_served_and_counted_by_their_outcome(bench, explore):
    """Of 100 requests that the gate would reject about `explore` are served; all of them are late."""
    engine = ScriptedGenerator(
        max_running=1, prefill_seconds=0.1, token_seconds=0.05, has_tandem_scheduler=True
    )

    async def scenario(b):
        b.generator.pace = Pace(milliseconds(50), milliseconds(20))
        assert await read(await b.ask()) == "word " * 4
        running = asyncio.create_task(read(await b.ask(max_tokens=400)))
        waiting = asyncio.create_task(read(await b.ask(max_tokens=400)))
        await asyncio.sleep(0.5)
        served = []
        for _ in range(100):
            try:
                served.append(await b.ask(max_tokens=1, service_class="interactive", ttft_ms=1))
            except Rejected as rejected:
                assert rejected.reject.reason is Reason.SLO_UNATTAINABLE
        for answer in served:
            await read(answer)
        await asyncio.gather(running, waiting)
        counted = b.service.status.metrics.registry.get_sample_value(
            "tandem_explored_total", {"class": "interactive", "outcome": "late"}
        )
        explored = sum(answer.ticket.is_explored for answer in served)
        assert (counted or 0) == explored
        assert (explored > 0) == (explore > 0)
        assert explored < 30

    sections = {**ENGINE, "admission": {**ENGINE["admission"], "explore": explore}}
    bench(scenario, generator=engine, **sections)
