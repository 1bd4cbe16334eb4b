"""A policy that raises fails only the undecided requests, and delays no drain."""

import asyncio
import logging
from dataclasses import dataclass, replace

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.request import Owner
from controlplane.policy.gate.admission import Admission
from controlplane.policy.gate.ordering import Ordering
from controlplane.service.runtime.health_tracker import Fault
from controlplane.service.ticket import DecisionFailed, Rejected
from tests.controlplane.service.scripted_bench import read

ONE_AT_A_TIME = {"admission": {"engine_queue": 0}}
SLOW = {"token_seconds": 0.05, "prefill_seconds": 0.1, "max_running": 1}


class Defect(Exception):
    pass


def faulty(*_: object, **__: object) -> None:
    raise Defect("division by zero")


class FaultyAdmission(Admission):
    yields_to_timely = faulty


@dataclass(frozen=True)
class FaultyFor:
    """An ordering that raises for one request."""

    ordering: Ordering
    prompt_tokens: int

    def rank(self, request, footprint, pace):
        if request.prompt_tokens == self.prompt_tokens:
            raise Defect("unranked")
        return self.ordering.rank(request, footprint, pace)


def decide_by(b, **changes) -> None:
    b.service.gate.set_policies(replace(b.service.gate.dispatcher._policies, **changes))


def faulty_admission(b) -> Admission:
    sound = b.service.gate.dispatcher._policies.admission
    return FaultyAdmission(sound.options, sound.fits)


def let_admission_raise(b) -> None:
    decide_by(b, admission=faulty_admission(b))


def errors(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


def test_undecided_requests_fail_at_once_and_are_logged_once(bench, caplog):
    async def scenario(b):
        sound = b.service.gate.dispatcher._policies.admission
        let_admission_raise(b)
        for _ in range(3):
            with pytest.raises(DecisionFailed, match="division by zero"):
                await b.ask()
            b.assert_nothing_is_held()
        assert b.service.status.impaired() == {"decisions": Fault.DEFECT}
        decide_by(b, admission=sound)
        assert await read(await b.ask()) == "word " * 4
        assert b.service.status.impaired() == {}

    assert bench(scenario).outcomes == ["failed"] * 3 + ["met"]
    [message] = errors(caplog)
    assert "requests fail without a decision: division by zero" in message


def test_a_drain_does_not_wait_for_failed_requests(bench):
    async def scenario(b):
        let_admission_raise(b)
        with pytest.raises(DecisionFailed):
            await b.ask()
        before = asyncio.get_running_loop().time()
        await b.service.drain()
        assert asyncio.get_running_loop().time() == before

    bench(scenario)


def test_an_observer_that_raises_fails_only_the_new_request(bench, caplog):
    async def scenario(b):
        running = asyncio.create_task(read(await b.ask(max_tokens=8)))
        b.service.gate.on_arrival = faulty
        with pytest.raises(DecisionFailed):
            await b.ask()
        b.service.gate.on_arrival = None
        assert await running == "word " * 8

    assert bench(scenario).outcomes == ["failed", "met"]
    assert len(errors(caplog)) == 1


def test_an_ordering_that_raises_for_one_request_leaves_the_others_queued(bench):
    async def scenario(b):
        running = asyncio.create_task(read(await b.ask(max_tokens=8)))
        waiting = asyncio.create_task(b.ask("waits"))
        await asyncio.sleep(0.01)
        decide_by(b, ordering=FaultyFor(b.service.gate.dispatcher._policies.ordering, len("poison")))
        with pytest.raises(DecisionFailed, match="unranked"):
            await b.ask("poison")
        assert await running == "word " * 8
        assert await read(await waiting) == "word " * 4

    b = bench(scenario, generator=ScriptedGenerator(**SLOW), **ONE_AT_A_TIME)
    assert b.outcomes == ["failed", "met", "met"]


def test_a_defect_does_not_fail_decided_requests_and_their_wait_stays_bounded(bench):
    """The running request finishes although the cycle at its end raises.

    The waiting one is decided again at its deadline and fails then.
    """

    async def scenario(b):
        running = asyncio.create_task(read(await b.ask(max_tokens=8)))
        waiting = asyncio.create_task(b.ask("waits"))
        await asyncio.sleep(0.01)
        dispatcher = b.service.gate.dispatcher
        dispatcher._policies = replace(dispatcher._policies, admission=faulty_admission(b))
        assert await running == "word " * 8
        assert len(dispatcher.queued(Owner.LLM)) == 1
        with pytest.raises(DecisionFailed):
            await waiting
        assert asyncio.get_running_loop().time() < 3

    sections = {"admission": {"engine_queue": 0, "max_wait_ms": 2_000}}
    b = bench(scenario, generator=ScriptedGenerator(**SLOW), **sections)
    assert b.outcomes == ["met", "failed"]


def test_a_failed_dispatch_closes_its_lease_and_the_next_request_starts(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        running = asyncio.create_task(read(await b.ask(max_tokens=8)))
        waiting = [asyncio.create_task(b.ask(text)) for text in ("first", "second")]
        await asyncio.sleep(0.01)
        started = dispatcher.ttft.dispatched

        def once_faulty(*arguments):
            dispatcher.ttft.dispatched = started
            raise Defect("no forecast")

        dispatcher.ttft.dispatched = once_faulty
        assert await running == "word " * 8
        with pytest.raises(DecisionFailed, match="no forecast"):
            await waiting[0]
        assert await read(await waiting[1]) == "word " * 4

    b = bench(scenario, generator=ScriptedGenerator(**SLOW), **ONE_AT_A_TIME)
    assert b.outcomes == ["met", "failed", "met"]


def test_undecided_embeddings_fail_likewise(bench):
    async def scenario(b):
        let_admission_raise(b)
        with pytest.raises(DecisionFailed):
            await b.embed("one")

    assert bench(scenario).outcomes == ["failed"]


def test_a_closed_gate_rejects_despite_a_faulty_policy(bench):
    async def scenario(b):
        let_admission_raise(b)
        await b.service.drain()
        with pytest.raises(Rejected):
            await b.ask()

    assert bench(scenario).outcomes == ["rejected"]


async def victim_of(b) -> asyncio.Task[str]:
    """A running generation of low priority that an urgent request would preempt."""
    assert await read(await b.ask(max_tokens=60)) == "word " * 60
    victim = asyncio.create_task(read(await b.ask(max_tokens=60, service_class="batch")))
    await asyncio.sleep(1.0)
    return victim


def test_a_victim_of_a_failed_dispatch_resumes(bench, monkeypatch):
    async def scenario(b):
        victim = await victim_of(b)
        with monkeypatch.context() as patched, pytest.raises(DecisionFailed, match="no lease"):
            patched.setattr(MemoryLedger, "open", faulty_lease)
            await b.ask(max_tokens=2, service_class="interactive")
        assert await asyncio.wait_for(victim, 20) == "word " * 60

    def faulty_lease(*_: object, **__: object) -> None:
        raise Defect("no lease")

    b = bench(scenario, generator=ScriptedGenerator(**SLOW), **ONE_AT_A_TIME)
    assert b.outcomes == ["met", "failed", "met"]


def test_a_preempted_request_resumes_after_a_failed_cycle(bench):
    async def scenario(b):
        victim = await victim_of(b)
        urgent = await b.ask(max_tokens=2, service_class="interactive")
        assert urgent.ticket.decision == "ADMIT_WITH_PREEMPTION"
        dispatcher = b.service.gate.dispatcher
        sound = dispatcher._policies
        dispatcher.decide()
        dispatcher._policies = replace(sound, admission=faulty_admission(b))
        assert await read(urgent) == "word " * 2
        dispatcher._policies = sound
        assert await asyncio.wait_for(victim, 20) == "word " * 60

    b = bench(scenario, generator=ScriptedGenerator(**SLOW), **ONE_AT_A_TIME)
    assert b.outcomes == ["met"] * 3


def test_a_defect_of_the_prefix_index_leaves_no_lease_open(bench, caplog):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        answer = await b.ask(max_tokens=8)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dispatcher.prefixes, "release", faulty)
            await answer.aclose()
        assert dispatcher.ledger.count(Owner.LLM) == 0
        assert await read(await b.ask(max_tokens=2)) == "word word "

    assert bench(scenario).outcomes == ["aborted", "met"]
    assert len(errors(caplog)) == 1
