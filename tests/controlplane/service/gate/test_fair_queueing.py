"""Backlogged tenants share by weight; a new tenant does not wait behind the backlog of another."""

import asyncio
from functools import partial
from itertools import accumulate

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace
from controlplane.core.request import Kind, Timeline
from controlplane.service.gate.fair_queueing import FairQueue, TenantQueues
from controlplane.service.gate.snapshot import service_time
from controlplane.service.ticket import Ticket
from tests.example_requests import a_request

WORK = seconds(0.1)
PACE = Pace(milliseconds(10), milliseconds(1))
asked = partial(a_request, "r", 20, 100)


def queue(fair, arrivals, work=WORK):
    """Tenant names in FCFS order, delayed by the fair queue."""
    ranked = [(at + fair.shift(name, work, at), n, name) for n, (at, name) in enumerate(arrivals)]
    return [name for _, _, name in sorted(ranked)]


@pytest.mark.parametrize("others", [{}, {"idle": 1.0}, {"idle": 9.0}])
@pytest.mark.parametrize("estimate", [0.8, 1.0, 2.0])
@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_two_backlogged_tenants_share_by_weight(weight, estimate, others):
    arrivals = [(Instant(n * WORK), name) for n in range(400) for name in ("heavy", "light")]
    fair = FairQueue({"heavy": weight, "light": 1.0, **others})
    served = queue(fair, arrivals, Duration(round(estimate * WORK)))[:300]
    assert served.count("heavy") / served.count("light") == pytest.approx(weight, rel=0.1)


def test_a_tenant_below_its_share_is_never_delayed():
    fair = FairQueue({"heavy": 2.0, "light": 1.0, "small": 1.0})
    shifts = {"heavy": [], "light": [], "small": []}
    for n in range(398):
        for name, every in (("heavy", 1), ("light", 1), ("small", 5)):
            if n % every == 0:
                shifts[name].append(fair.shift(name, WORK, Instant(n * WORK)))
    assert max(shifts["small"]) == 0
    last = 397 * WORK
    assert last + shifts["light"][-1] == pytest.approx(2 * (last + shifts["heavy"][-1]), rel=0.05)


def test_a_new_tenant_overtakes_the_backlog_of_another():
    flood = [(Instant(0), "flood")] * 100
    served = queue(FairQueue({"flood": 1.0, "new": 1.0}), [*flood, (Instant(seconds(2)), "new")])
    waited = list(accumulate(WORK for name in served[: served.index("new")]))[-1]
    assert waited <= seconds(2) + 2 * WORK


def test_refunded_work_delays_no_request():
    fair = FairQueue({"a": 1.0, "b": 1.0})
    for _ in range(50):
        fair.shift("a", WORK, Instant(0))
        fair.refund("a", WORK)
    assert fair.shift("a", WORK, Instant(0)) == 0


def test_the_delay_is_bounded_and_zero_without_weights_or_backlog():
    tenants, granted = TenantQueues({"a": 1.0, "b": 1.0}), asyncio.new_event_loop().create_future()
    tickets = [Ticket(asked(), Footprint(1), None, Timeline(Instant(0)), granted) for _ in range(100)]
    for ticket in tickets:
        tenants.assign_delay(ticket, WORK, seconds(1), Instant(0))
    assert max(ticket.tenant_delay for ticket in tickets) == seconds(1)
    for weights in ({}, {"a": 2.0}):
        assert [FairQueue(weights).shift("a", WORK, Instant(n)) for n in range(3)] == [0, 0, 0]
    idle = FairQueue({"a": 1.0, "b": 1.0})
    assert {idle.shift("a", WORK, Instant(2 * n * WORK)) for n in range(10)} == {Duration(0)}


def test_service_time_follows_the_scarcer_of_memory_and_slots():
    footprint = Footprint(base=200, per_step=0, steps=100)
    assert service_time(asked(), footprint, PACE, 1_000, 50) == milliseconds(20 * 10 + 20)
    assert service_time(asked(), footprint, PACE, 100_000, 50) == milliseconds(2 * 10 + 20)
    assert service_time(asked(sequences=4), footprint, PACE, 100_000, 50) == milliseconds(8 * 10 + 20)
    assert service_time(asked(kind=Kind.EMBED), footprint, PACE, 100_000, 50) == milliseconds(20)


def test_a_client_that_leaves_before_dispatch_is_not_charged(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        dispatcher.pace_estimators.llm.observe_step(seconds(1))
        running = await b.ask()
        delays = []
        for _ in range(3):
            waiting = asyncio.create_task(b.ask())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            delays.append(dispatcher.tickets()[-1].tenant_delay)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert delays == [delays[0]] * 3
        assert delays[0] > 0
        await running.aclose()

    tenants = {
        name: {"api_keys_sha256": [key * 64], "weight": 1.0}
        for name, key in [("tests", "0"), ("others", "1")]
    }
    one_place = ScriptedGenerator(max_running=1)
    bench(scenario, generator=one_place, admission={"engine_queue": 0}, tenants=tenants)


def test_changed_weights_keep_the_backlog():
    fair = FairQueue({"a": 1.0, "b": 1.0})
    for _ in range(10):
        fair.shift("a", WORK, Instant(0))
    fair.set_weights({"a": 1.0, "c": 3.0})
    assert fair.shift("c", WORK, Instant(0)) == 0
    assert fair.shift("a", WORK, Instant(0)) >= 10 * WORK
    fair.refund("b", WORK)
