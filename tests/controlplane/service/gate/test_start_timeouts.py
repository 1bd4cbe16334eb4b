"""Forwarded requests that the engine does not start are evicted after `admission.max_wait_ms`."""

import asyncio
import gc
import logging
from collections import Counter

import numpy as np
import pytest

from backends.cost_models.step_time import llm_only
from backends.testing.scripted import ScriptedGenerator
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedRequest, arrival_times, simulate
from controlplane.core.clock import to_seconds
from controlplane.core.decision import Reason
from controlplane.service.ticket import Rejected
from predictors.calibration import StatedForecast
from tests.controlplane.service.scripted_bench import read

log = logging.getLogger(__name__)

ENGINE = {"scheduling": {"engine": {}}, "admission": {"max_wait_ms": 2_000}}


def one_at_a_time() -> ScriptedGenerator:
    return ScriptedGenerator(
        has_tandem_scheduler=True, max_running=1, prefill_seconds=0.1, token_seconds=0.1, kv_bytes=2**20
    )


def test_only_requests_that_the_engine_has_not_started_are_evicted(bench):
    async def scenario(b):
        answers = [await b.ask("x", max_tokens=30) for _ in range(3)]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(1.99)
        assert b.outcomes == []
        await asyncio.sleep(0.02)
        assert b.outcomes == ["evicted"] * 2 and answers[0].ticket.outcome is None
        for late in reading[1:]:
            with pytest.raises(Rejected) as caught:
                await late
            assert caught.value.is_evicted and caught.value.reject.reason is Reason.QUEUE_TIMEOUT
            assert to_seconds(caught.value.reject.retry_after) == 2
        await reading[0]

    one = bench(scenario, generator=one_at_a_time(), **ENGINE)
    assert one.outcomes == ["evicted", "evicted", "met"]
    registry, labels = one.service.status.metrics.registry, {"kind": "generate", "reason": "queue_timeout"}
    decided = [
        registry.get_sample_value("tandem_decisions_total", labels | {"decision": decision})
        for decision in ("EVICT", "REJECT")
    ]
    assert decided == [2, 0]


def test_an_exception_of_one_eviction_does_not_spare_the_others(bench, caplog):
    async def scenario(b):
        dispatcher, failed = b.service.gate.dispatcher, []
        evict = dispatcher.evict_unstarted

        def fail_once(request_id: str) -> None:
            if not failed:
                failed.append(request_id)
                raise RuntimeError("torn report")
            evict(request_id)

        dispatcher.evict_unstarted = fail_once
        answers = [await b.ask("x", max_tokens=30) for _ in range(4)]
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(2.01)
        # The first one runs.
        assert failed == [answers[0].ticket.request.id] and b.outcomes == ["evicted"] * 3
        await asyncio.gather(*reading, return_exceptions=True)

    assert bench(scenario, generator=one_at_a_time(), **ENGINE).outcomes == ["evicted"] * 3 + ["met"]
    assert "torn report" in caplog.text


def test_nothing_is_kept_of_requests_that_were_evicted(bench):
    def kept() -> int:
        gc.collect()
        found = gc.get_objects()
        return sum(isinstance(each, StatedForecast) for each in found) + sum(
            isinstance(each, asyncio.Task) and each.done() for each in found
        )

    async def scenario(b):
        before = kept()
        for _ in range(2):
            answers = [await b.ask("x", max_tokens=25) for _ in range(20)]
            await asyncio.gather(*(read(answer) for answer in answers), return_exceptions=True)
            del answers
        assert b.outcomes.count("evicted") == 38
        # The tasks of gather are released in the event loop's next turn.
        await asyncio.sleep(1)
        assert kept() <= before

    bench(scenario, generator=one_at_a_time(), **ENGINE)


def test_a_preempted_request_is_not_evicted(bench):
    async def scenario(b):
        answer = await b.ask("x", max_tokens=30)
        reading = asyncio.create_task(read(answer))
        await asyncio.sleep(0.5)
        answer.ticket.preemptions = 1
        await reading

    assert bench(scenario, generator=one_at_a_time(), **ENGINE).outcomes == ["met"]


def test_the_time_in_force_counts_for_new_requests(bench):
    async def scenario(b):
        change = {"admission": {"max_wait_ms": 60_000}}
        await b.service.reconfiguration.change(change, source="test")
        answers = [await b.ask("x", max_tokens=30) for _ in range(3)]
        await asyncio.gather(*(read(answer) for answer in answers))

    assert bench(scenario, generator=one_at_a_time(), **ENGINE).outcomes == ["met"] * 3


def test_a_shorter_time_counts_although_earlier_requests_have_longer(bench):
    async def scenario(b):
        answers = [await b.ask("x", max_tokens=40) for _ in range(2)]
        change = {"admission": {"max_wait_ms": 500}}
        await b.service.reconfiguration.change(change, source="test")
        answers.append(await b.ask("x", max_tokens=40))
        reading = [asyncio.create_task(read(answer)) for answer in answers]
        await asyncio.sleep(0.51)
        assert b.outcomes == ["evicted"] and answers[2].ticket.outcome is not None
        await asyncio.gather(*reading, return_exceptions=True)

    assert bench(scenario, generator=one_at_a_time(), **ENGINE).outcomes == ["evicted", "evicted", "met"]


@pytest.mark.parametrize("rate", [300, 600])
@pytest.mark.slow
def test_under_overload_that_lasts_every_request_is_answered_soon(rate: int):
    """An engine of 100 requests/s: with a short patience first tokens come soon, and more of them in time."""
    arrivals = arrival_times(np.random.default_rng(0), rate, 2_000, variation=1.0)
    offered = [SimulatedRequest(at, prompt_tokens=10, output_tokens=2) for at in arrivals]
    machine = Machine(llm_only(lambda *_: 0.08), max_running=16)
    met, slowest = {}, {}
    for patience_ms in (60_000, 1_500):
        sections = {
            "classes": {"interactive": {"ttft_ms": 1_000, "default": True}},
            "admission": {"max_wait_ms": patience_ms},
            "scheduling": {"engine": {}},
        }
        records = simulate(offered, machine, sections).records
        met[patience_ms] = sum(record.outcome == "met" for record in records)
        waits = [each.first_token - each.arrival for each in records if each.first_token is not None]
        slowest[patience_ms] = max(waits) / 1e9
        log.info("%d/s, patience %d ms: %s", rate, patience_ms, Counter(each.outcome for each in records))
    log.info("met %s; slowest first token, s: %s", met, slowest)
    assert slowest[1_500] < 2 < 10 < slowest[60_000]
    assert met[1_500] > met[60_000]
