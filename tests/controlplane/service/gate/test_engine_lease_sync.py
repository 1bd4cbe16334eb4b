"""An engine with Tandem's scheduler: the gate accepts requests, the engine starts them."""

import asyncio
from functools import partial

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.clock import milliseconds, to_seconds
from controlplane.core.decision import Reason
from controlplane.core.engine_reports import EngineStep
from controlplane.core.pool_view import Pace
from controlplane.core.request import Owner, Phase
from controlplane.service.decision_history import Preempted
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read

BLOCK = 16 * 1_024
ORDERED = {"scheduling": {"engine": {"ordering": "srmt"}}}


def ordering(**options: float) -> ScriptedGenerator:
    return ScriptedGenerator(
        has_tandem_scheduler=True,
        **{"max_running": 1, "prefill_seconds": 0.1, "token_seconds": 0.1, **options},
    )


def test_accepted_requests_are_forwarded_at_once_and_leases_follow_the_engine(bench):
    async def scenario(b):
        # Each may need 6 of 8 blocks, so a gate that reserved them would admit one at a time.
        answers = [await b.ask("x" * 40, max_tokens=50) for _ in range(3)]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0.15)
        ledger = b.service.gate.dispatcher.ledger
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 0
        assert [answer.ticket.decision for answer in answers] == ["ADMIT"] * 3
        owner = b.service.status.state()["owners"]["llm"]
        assert owner["held_bytes"] == b.generator.state().used_bytes == 3 * BLOCK
        assert (owner["running"], ledger.deficit(Owner.LLM)) == (3, 0)
        standing = [ledger.lease_state(answer.ticket.lease)[0] for answer in answers]
        assert sorted(standing) == [0, 0, 3 * BLOCK]
        ledger.check_integrity()
        await asyncio.gather(*reading)

    b = bench(scenario, generator=ordering(kv_bytes=8 * BLOCK), **ORDERED)
    assert b.outcomes == ["met"] * 3


def test_a_request_that_would_be_late_in_the_engine_is_rejected_at_once(bench):
    async def scenario(b):
        b.generator.pace = Pace(milliseconds(100), milliseconds(1))
        ask = partial(b.ask, service_class="interactive")
        others = [await ask("x" * 40, max_tokens=60, ttft_ms=60_000) for _ in range(6)]
        reading = [asyncio.create_task(read(answer)) for answer in others]
        await asyncio.sleep(0.15)
        with pytest.raises(Rejected) as caught:
            await ask("x" * 45, max_tokens=65, ttft_ms=900)
        assert caught.value.reject.reason is Reason.SLO_UNATTAINABLE
        assert to_seconds(caught.value.reject.retry_after) > 1
        # Shortest first: hardly any request precedes a short one, and one that is not sheddable waits anyway.
        small = await ask("x", max_tokens=1, ttft_ms=9_000)
        late = await b.ask("x" * 45, max_tokens=65, ttft_ms=300)
        assert small.ticket.predicted_ttft_ms < late.ticket.predicted_ttft_ms
        # The scripted engine serves in the order of arrival only.
        await small.aclose()
        await asyncio.gather(*reading, read(late))

    config = {**ORDERED, "admission": {"length_predictor": "max-tokens"}}
    b = bench(scenario, generator=ordering(kv_bytes=8 * BLOCK), **config)
    assert sorted(b.outcomes) == ["aborted", "late", *["met"] * 6, "rejected"]


def test_memory_that_the_engine_can_preempt_delays_no_request(bench):
    async def scenario(b):
        b.generator.pace = Pace(milliseconds(100), milliseconds(1))
        low = await b.ask("x" * 110, max_tokens=16, service_class="batch")
        reading = asyncio.create_task(read(low))
        await asyncio.sleep(0.15)
        urgent = await b.ask("x" * 40, max_tokens=4, service_class="interactive", ttft_ms=900)
        assert urgent.ticket.decision == "ADMIT"
        assert urgent.ticket.predicted_ttft_ms < 900
        await urgent.aclose()
        b.generator.pace = Pace(milliseconds(1_000), milliseconds(1))
        late = await b.ask("x" * 40, max_tokens=4, service_class="interactive", ttft_ms=900)
        assert late.ticket.predicted_ttft_ms > 900
        await late.aclose()
        await reading

    generator = ordering(kv_bytes=8 * BLOCK, max_running=2)
    config = {**ORDERED, "admission": {"length_predictor": "max-tokens"}}
    assert bench(scenario, generator=generator, **config).outcomes == ["aborted", "aborted", "met"]


def test_a_request_larger_than_the_quota_is_rejected(bench):
    async def scenario(b):
        b.service.gate.dispatcher.ledger.set_quota(Owner.LLM, 4 * BLOCK)
        with pytest.raises(Rejected) as caught:
            await b.ask("x" * 40, max_tokens=60)
        assert caught.value.reject.reason is Reason.NEVER_FITS
        assert "at most 65,536" in caught.value.reject.detail
        await read(await b.ask("x" * 40, max_tokens=20))

    b = bench(scenario, generator=ordering(kv_bytes=8 * BLOCK), **ORDERED)
    assert b.outcomes == ["rejected", "met"]


def test_a_lower_quota_frees_memory_only_as_the_engine_frees_blocks(bench):
    async def scenario(b):
        dispatcher, ledger = b.service.gate.dispatcher, b.service.gate.dispatcher.ledger
        answer = await b.ask("x" * 100, max_tokens=20)
        reading = asyncio.create_task(read(answer))
        await asyncio.sleep(0.15)
        dispatcher.sync_engine_leases()
        assert ledger.held(Owner.LLM) == 7 * BLOCK
        ledger.set_quota(Owner.LLM, 4 * BLOCK)
        assert ledger.held(Owner.LLM) == 7 * BLOCK
        await b.generator.set_quota(4 * BLOCK)
        reading.cancel()
        await asyncio.wait([reading])
        assert ledger.held(Owner.LLM) == 0

    assert bench(scenario, generator=ordering(kv_bytes=8 * BLOCK), **ORDERED).outcomes == ["aborted"]


def test_a_preemption_by_the_gate_does_not_count_as_one_by_the_engine_too(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        answers = [await b.ask("x" * 40, max_tokens=4, service_class="batch") for _ in range(2)]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0.15)
        dispatcher.sync_engine_leases()
        assert dispatcher.reclaim(1, priority=1) == 3 * BLOCK
        # The engine has one slot: the victim is forwarded again at once and waits there behind the other.
        dispatcher.decide()
        while not all(task.done() for task in reading):
            await asyncio.sleep(0.05)
            dispatcher.sync_engine_leases()
        history = answers[0].ticket.history
        assert [event.by for event in history if isinstance(event, Preempted)] == ["gate"]

    assert bench(scenario, generator=ordering(), **ORDERED).outcomes == ["met"] * 2


def test_a_full_engine_queue_makes_requests_wait_at_the_gate(bench):
    async def scenario(b):
        first, second = await b.ask(max_tokens=3), await b.ask(max_tokens=3)
        third = asyncio.create_task(b.ask(max_tokens=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 1
        await asyncio.gather(read(first), read(second))
        assert (await third).ticket.phase is Phase.PREFILL
        await read(await third)

    b = bench(scenario, generator=ordering(), **ORDERED, admission={"engine_queue": 1})
    assert b.outcomes == ["met"] * 3


PACED = {"service_class": "interactive", "ttft_ms": 60_000, "tpot_ms": 24}


def steps_of_5_ms_more_for_each_answer(b) -> None:
    """Two requests meet a TPOT of 24 ms, three do not."""
    for decodes in (1, 2, 3, 4) * 64:
        b.generator.on_step(EngineStep(0, decodes, 0, milliseconds(10 + 5 * decodes)))


def test_a_request_that_would_break_the_tpot_of_running_ones_waits_at_the_gate(bench):
    async def scenario(b):
        steps_of_5_ms_more_for_each_answer(b)
        answers = [await b.ask(max_tokens=20, **PACED) for _ in range(2)]
        third = asyncio.create_task(b.ask(max_tokens=20, **PACED))
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0.15)
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 1
        await asyncio.gather(*reading)
        await read(await third)

    config = {**ORDERED, "admission": {"length_predictor": "max-tokens"}}
    generator = ordering(max_running=8, token_seconds=0.02)
    assert bench(scenario, generator=generator, **config).outcomes == ["met"] * 3


def test_requests_without_blocks_lengthen_no_step(bench):
    async def scenario(b):
        steps_of_5_ms_more_for_each_answer(b)
        # One of the four fills the cache; three wait for it in the engine.
        answers = [await b.ask("x" * 110, max_tokens=17, **PACED) for _ in range(4)]
        assert len(b.service.gate.dispatcher.queued(Owner.LLM)) == 0
        await asyncio.gather(*map(read, answers))

    config = {**ORDERED, "admission": {"length_predictor": "max-tokens"}}
    generator = ordering(kv_bytes=8 * BLOCK, token_seconds=0.02)
    assert bench(scenario, generator=generator, **config).outcomes == ["met"] * 4


def test_a_new_length_forecast_reaches_the_engine_during_generation(bench):
    async def scenario(b):
        long = await b.ask("x", max_tokens=200)
        at_first = long.ticket.forecast
        reading = asyncio.create_task(read(long))
        for answered in range(25):
            assert answered > 10 or b.generator.forecasts == {}
            await read(await b.ask("x", max_tokens=4))
        await reading
        assert b.generator.forecasts == {long.ticket.request.id: long.ticket.forecast}
        assert long.ticket.forecast.mean < at_first.mean

    history = {**ORDERED, "admission": {"length_predictor": "history"}}
    b = bench(scenario, generator=ordering(max_running=2, token_seconds=0.8), **history)
    assert len(b.outcomes) == 26


def test_only_changed_engine_options_reset_what_the_size_cutoff_has_learned(bench):
    async def scenario(b):
        leases = b.service.gate.dispatcher._engine_leases
        learned = leases.precedence.cutoff
        assert learned is not None
        await b.service.reconfiguration.change({"admission": {"max_waiting": 7}}, source="test")
        assert leases.precedence.cutoff is learned
        await b.service.reconfiguration.change({"scheduling": {"engine": {"settle_steps": 7}}}, source="test")
        assert leases.precedence.cutoff is not learned

    bench(scenario, generator=ordering(), **ORDERED)
