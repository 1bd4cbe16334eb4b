"""A dead LLM engine is restarted with backoff and a bound; its requests end once, and embeddings go on."""

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.decision import Reason
from controlplane.core.errors import BackendDown
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read

START_SECONDS = 20.0


class SlowStart(ScriptedGenerator):
    """Each start takes START_SECONDS; the starts numbered in `failing` fail, those in `hanging` never end."""

    def __init__(self, *, failing=(), hanging=(), **options) -> None:
        super().__init__(prefill_seconds=0.1, token_seconds=0.1, **options)
        self.started_at: list[float] = []
        self.failing, self.hanging = failing, hanging
        self.on_start = self.load

    async def load(self) -> None:
        self.started_at.append(now())
        number = len(self.started_at)
        await (asyncio.Event().wait() if number in self.hanging else asyncio.sleep(START_SECONDS))
        if number in self.failing:
            raise BackendDown("no memory for the weights")


def now() -> float:
    return asyncio.get_running_loop().time()


def models(**restart):
    return {"models": {"chat": {"model": "scripted", "restart": restart}}}


async def until_ready(b) -> float:
    """Polls readiness as an orchestrator does; returns the time at which it holds."""
    while True:
        with suppress(BackendDown):
            await b.service.check()
            return now()
        await asyncio.sleep(0.05)


def test_a_request_in_flight_ends_once_with_the_time_of_the_restart(bench):
    async def scenario(b):
        reading = asyncio.create_task(read(await b.ask(max_tokens=1_000)))
        unread = await b.ask(max_tokens=1_000)
        await anext(unread)
        await b.generator.until_runs(2)
        b.generator.die("it was killed")
        with pytest.raises(BackendDown, match="it was killed; it is restarted") as caught:
            await reading
        assert caught.value.retry_after == pytest.approx(START_SECONDS)
        # The lease of a stream that nothing reads is closed all the same.
        b.assert_nothing_is_held()
        assert await until_ready(b) == pytest.approx(2 * START_SECONDS + 0.1, abs=0.2)
        with pytest.raises(BackendDown, match="it was killed"):
            await anext(unread)
        assert await read(await b.ask(max_tokens=3)) == "word " * 3

    b = bench(scenario, generator=SlowStart())
    assert b.outcomes == ["failed", "failed", "met"]


def test_while_the_engine_starts_requests_are_rejected_and_embeddings_served(bench):
    async def scenario(b):
        b.generator.max_running = 1
        running = asyncio.create_task(read(await b.ask(max_tokens=1_000)))
        waiting = asyncio.create_task(b.ask())
        await b.generator.until_runs(1)
        b.generator.die()
        await asyncio.wait([running, waiting])
        assert isinstance(running.exception(), BackendDown)
        reject = waiting.exception().reject
        assert (reject.reason, reject.retry_after / 1e9) == (Reason.ENGINE_DOWN, START_SECONDS)
        await asyncio.sleep(5)
        assert len((await b.embed("text")).vectors) == 1
        with pytest.raises(Rejected) as caught:
            await b.ask()
        assert caught.value.reject.retry_after / 1e9 == pytest.approx(START_SECONDS - 5.1, abs=0.2)
        with pytest.raises(BackendDown, match="it is restarted"):
            await b.service.check()
        await until_ready(b)
        assert await read(await b.ask(max_tokens=2)) == "word " * 2

    b = bench(scenario, generator=SlowStart(max_running=1), admission={"engine_queue": 0})
    assert sorted(b.outcomes) == ["failed", "met", "met", "rejected", "rejected"]


def test_restarts_back_off_and_stop_after_the_bound(bench):
    async def scenario(b):
        b.generator.die()
        await b.service.until_given_up()
        first, *starts = b.generator.started_at
        pauses = [after - before - START_SECONDS for before, after in pairwise(starts)]
        assert (first, starts[0]) == (0.0, START_SECONDS)
        assert pauses == pytest.approx([1.0, 2.0, 4.0])
        with pytest.raises(Rejected) as caught:
            await b.ask()
        assert caught.value.reject.retry_after is None
        with pytest.raises(BackendDown, match="it is not restarted") as refused:
            await b.service.check()
        assert refused.value.is_permanent
        assert len((await b.embed("text")).vectors) == 1
        assert b"tandem_engine_restarts_total 4.0" in b.service.metrics_text()

    bench(scenario, generator=SlowStart(failing=range(2, 9)), **models(attempts=4))


def test_attempts_count_within_the_window_only(bench):
    async def scenario(b):
        for _ in range(6):
            b.generator.die()
            await until_ready(b)
            await asyncio.sleep(100)
        for _ in range(2):
            b.generator.die()
            await until_ready(b)
        b.generator.die()
        await b.service.until_given_up()

    b = bench(scenario, generator=SlowStart(), **models(attempts=2, window_ms=100_000))
    assert len(b.generator.started_at) == 1 + 8


def test_a_restart_that_hangs_is_ended_and_repeated(bench):
    async def scenario(b):
        b.generator.die()
        await until_ready(b)
        _, hanging, last = b.generator.started_at
        # Ten times the first start, then the first backoff.
        assert last - hanging == pytest.approx(10 * START_SECONDS + 1)

    bench(scenario, generator=SlowStart(hanging=[2]))


def test_never_restarts_nothing(bench):
    async def scenario(b):
        reading = asyncio.create_task(read(await b.ask(max_tokens=1_000)))
        await b.generator.until_runs(1)
        b.generator.die()
        await b.service.until_given_up()
        with pytest.raises(BackendDown) as caught:
            await reading
        assert caught.value.is_permanent and caught.value.retry_after is None
        assert len(b.generator.started_at) == 1

    bench(scenario, generator=SlowStart(), models={"chat": {"model": "scripted", "restart": "never"}})


def test_a_restarted_engine_gets_the_options_in_force(bench):
    async def scenario(b):
        await b.service.reconfiguration.change({"scheduling": {"engine": {"urgency": 0.75}}}, source="test")
        b.embedder.on_computing(True)
        b.generator.options, b.generator.is_sharing = {}, False
        b.generator.die()
        await until_ready(b)
        assert b.generator.options["urgency"] == 0.75
        assert b.generator.options.keys() > {"ordering", "look_ahead"}
        assert b.generator.is_sharing

    generator = SlowStart(has_tandem_scheduler=True)
    bench(scenario, generator=generator, scheduling={"engine": {"ordering": "edf"}})


def test_an_engine_that_refuses_its_options_is_restarted_again(bench):
    async def scenario(b):
        calls = 0

        async def die_at_the_first_order():
            nonlocal calls
            calls += 1
            if calls == 1:
                b.generator.die("it died while it was set up")

        b.generator.on_order = die_at_the_first_order
        b.generator.die()
        await until_ready(b)
        assert len(b.generator.started_at) == 3
        assert await read(await b.ask(max_tokens=2)) == "word " * 2

    generator = SlowStart(has_tandem_scheduler=True)
    bench(scenario, generator=generator, scheduling={"engine": {"ordering": "edf"}})


def test_what_was_learned_survives_a_restart(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=20))
        pace = b.service.gate.dispatcher.pace_estimators.llm.pace
        assert pace is not None
        b.generator.die()
        await until_ready(b)
        assert b.service.gate.dispatcher.pace_estimators.llm.pace == pace

    bench(scenario, generator=SlowStart())


def test_a_stop_ends_a_restart_in_progress(bench):
    async def scenario(b):
        b.generator.die()
        await asyncio.sleep(5)
        start = now()
        await b.service.stop()
        assert now() == start
        with pytest.raises(BackendDown):
            await b.generator.check()

    bench(scenario, generator=SlowStart(), embedder=ScriptedEmbedder())
