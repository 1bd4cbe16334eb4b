"""The history of a request: its decisions, its preemptions, the forecasts and what came of them."""

import asyncio
import json
from functools import partial

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.clock import Instant, milliseconds
from controlplane.core.engine_reports import EnginePreemption
from controlplane.core.pool_view import Pace
from controlplane.core.request import Owner
from controlplane.service.gate.explanation import render_history
from controlplane.service.ticket import Rejected
from tests.controlplane.service.gate.test_engine_lease_sync import BLOCK, ORDERED, ordering
from tests.controlplane.service.scripted_bench import read


def history_of(ticket):
    return render_history(ticket, Instant(0))


def decisions(history):
    return [(each["decision"], each.get("reason") or each.get("by")) for each in history["decisions"]]


def test_a_victim_names_the_request_that_it_was_preempted_for(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=60))
        victim = await b.ask(max_tokens=60, service_class="batch")
        text = asyncio.create_task(read(victim))
        await b.generator.until_runs(2)
        await asyncio.sleep(1.0)
        urgent = await b.ask(max_tokens=2, service_class="interactive")
        await read(urgent)
        await text
        # The same client request id: all of them, in the order in which they ended.
        found = await b.service.gate.histories("test")
        assert [each["id"] for each in found] == [ticket.request.id for ticket in b.ended]

    generator = ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=0.1)
    b = bench(scenario, generator=generator, admission={"engine_queue": 0})
    _, urgent, victim = (history_of(ticket) for ticket in b.ended)
    (admitted,) = urgent["decisions"]
    assert (admitted["decision"], admitted["victims"]) == ("ADMIT_WITH_PREEMPTION", [victim["id"]])
    assert decisions(victim) == [("ADMIT", None), ("PREEMPTED", "gate"), ("ADMIT", None)]
    assert victim["decisions"][1]["for"] == urgent["id"]
    assert victim["measured"]["preemptions"] == {"gate": 1, "engine": 0}
    assert victim["measured"]["gap_ms"] >= 200


def test_other_tasks_run_while_many_requests_of_one_id_are_rendered(bench):
    async def scenario(b):
        for _ in range(8):
            await read(await b.ask(max_tokens=2))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        found = await b.service.gate.histories("test")
        task.cancel()
        assert len(found) == 8 and turns >= 7

    bench(scenario)


def test_a_preemption_by_the_engine_names_the_request_that_starts_in_its_place(bench):
    async def scenario(b):
        dispatcher, now = b.service.gate.dispatcher, b.service.gate.clock.now
        victim = await b.ask("x" * 40, max_tokens=9, service_class="batch")
        urgent = await b.ask("x" * 40, max_tokens=9, service_class="interactive")
        reading = [asyncio.create_task(read(answer)) for answer in (victim, urgent)]
        await asyncio.sleep(0.45)
        of, lost = victim.ticket.request.id, b.generator.preempted
        lost.append(EnginePreemption(now(), of, urgent.ticket.request.id, 45))
        b.service.live.sample()
        dispatcher.sync_engine_leases()
        shown = [
            one for one in json.loads(b.service.live.since(0, ""))["records"] if one["type"] == "preemption"
        ]
        assert [(one["class"], one["for_class"], one["by"]) for one in shown] == [
            ("batch", "interactive", "engine")
        ]
        await asyncio.sleep(0.01)
        # Found at the end of the request, if nothing else is decided until then.
        lost.append(EnginePreemption(now(), of, None, 46))
        await asyncio.gather(*reading)

    b = bench(scenario, generator=ordering(kv_bytes=8 * BLOCK, max_running=2), **ORDERED)
    victim = next(ticket for ticket in b.ended if ticket.request.service_class.name == "batch")
    urgent = next(ticket for ticket in b.ended if ticket is not victim)
    found = history_of(victim)
    assert decisions(found) == [("ADMIT", None), ("PREEMPTED", "engine"), ("PREEMPTED", "engine")]
    first, second = found["decisions"][1:]
    assert (first["at_ms"], first["for"], first["recompute_tokens"]) == (450, urgent.request.id, 45)
    assert (second["at_ms"], second["for"], second["recompute_tokens"]) == (460, None, 46)
    assert found["measured"]["preemptions"] == {"gate": 0, "engine": 2}
    assert decisions(history_of(urgent)) == [("ADMIT", None)]
    assert [event.beneficiary_class for event in victim.history[-2:]] == ["interactive", None]


def test_a_rejection_shows_the_wait_that_it_follows_from(bench):
    async def scenario(b):
        b.generator.pace = Pace(milliseconds(100), milliseconds(1))
        ask = partial(b.ask, service_class="interactive")
        others = [await ask("x" * 40, max_tokens=60, ttft_ms=60_000) for _ in range(6)]
        reading = [asyncio.create_task(read(answer)) for answer in others]
        await asyncio.sleep(0.15)
        with pytest.raises(Rejected):
            await ask("x" * 45, max_tokens=65, ttft_ms=900)
        await asyncio.gather(*reading)

    config = {**ORDERED, "admission": {"length_predictor": "max-tokens"}}
    b = bench(scenario, generator=ordering(kv_bytes=8 * BLOCK), **config)
    found = history_of(b.ended[0])
    assert (found["outcome"], found["phase"]) == ("rejected", "finished")
    (rejected,) = found["decisions"]
    assert (rejected["decision"], rejected["reason"]) == ("REJECT", "slo_unattainable")
    assert rejected["time"]["predicted_wait_ms"] > rejected["time"]["latest_start_ms"] > 0
    assert rejected["memory"]["ceiling_bytes"] == 8 * BLOCK
    assert found["request"]["objectives_ms"] == {"ttft": 900}
    assert found["predicted"]["output_tokens"]["mean"] == 65
    # A request without tokens has no first token and no pace; it was waiting until its end.
    measured = found["measured"]
    assert [measured[f"{name}_ms"] for name in ("ttft", "tpot", "gap")] == [None, None, None]
    assert measured["e2e_ms"] is not None and measured["output_tokens"] == 0
    late = history_of(b.ended[1])
    assert late["predicted"]["ttft_upper_ms"] >= late["predicted"]["ttft_ms"] > 0
    assert late["measured"]["ttft_ms"] == pytest.approx(100)


def test_a_request_over_its_rate_is_explained_without_numbers(bench):
    async def scenario(b):
        await read(await b.ask())
        with pytest.raises(Rejected):
            await b.ask()

    tenants = {"tests": {"api_keys_sha256": ["0" * 64], "requests_per_minute": 1}}
    b = bench(scenario, tenants=tenants)
    (rejected,) = history_of(b.ended[1])["decisions"]
    assert rejected == {
        "at_ms": 0.0, "decision": "REJECT", "reason": "rate_limited", "retry_after_ms": 59_750.0,
        "config_version": 1,
    }  # fmt: skip


def test_a_late_request_names_the_objective_that_it_missed(bench):
    async def scenario(b):
        await read(await b.ask(max_tokens=30, ttft_ms=5_000, tpot_ms=10))

    b = bench(scenario)
    found = history_of(b.ended[0])
    assert (found["outcome"], found["missed"]) == ("late", ["tpot"])
    assert found["measured"]["tpot_ms"] == pytest.approx(50)


def test_a_waiting_embedding_whose_footprint_was_capped_is_explained(bench):
    async def scenario(b):
        gate, dispatcher = b.service.gate, b.service.gate.dispatcher
        tasks = [asyncio.create_task(b.embed(*["x" * 500] * 8)) for _ in range(5)]
        await b.embedder.until_runs(4)
        (waiting,) = dispatcher.queued(Owner.EMBEDDING)
        dispatcher.cap_footprints(Owner.EMBEDDING, waiting.footprint.base - 1)
        (found,) = await gate.histories(waiting.request.id)
        assert found["now"]["decision"] == "DEFER"
        assert found["now"]["memory"]["needs_bytes"] == waiting.footprint.base - 1
        await asyncio.gather(*tasks)

    bench(scenario)
