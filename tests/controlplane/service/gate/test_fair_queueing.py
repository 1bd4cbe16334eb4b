"""Tenants with work get their weight's part; one that comes new does not wait behind another's backlog."""

import asyncio
from itertools import accumulate

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.memory import Footprint
from controlplane.core.request import Kind, Owner, Request, Timeline
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace
from controlplane.service.gate.fair_queueing import FairQueue, TenantQueues
from controlplane.service.gate.snapshot import service_time
from controlplane.service.ticket import Ticket

WORK = seconds(0.1)
PACE = Pace(milliseconds(10), milliseconds(1))


def queue(turns, arrivals, work=WORK):
    """Names in the order of first come first served, moved back by their turns."""
    ranked = [(at + turns.shift(name, work, at), n, name) for n, (at, name) in enumerate(arrivals)]
    return [name for _, _, name in sorted(ranked)]


def a_request(kind=Kind.GENERATE, tenant="a", sequences=1):
    klass = ServiceClass("any", Slo(), 0, sheddable=False)
    return Request("r", kind, "m", tenant, klass, Slo(), Instant(0), 20, 100, sequences=sequences)


@pytest.mark.parametrize("others", [{}, {"idle": 1.0}, {"idle": 9.0}])
@pytest.mark.parametrize("believed", [0.8, 1.0, 2.0])
@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_two_that_each_ask_for_everything_share_by_weight(weight, believed, others):
    arrivals = [(Instant(n * WORK), name) for n in range(400) for name in ("heavy", "light")]
    turns = FairQueue({"heavy": weight, "light": 1.0, **others})
    served = queue(turns, arrivals, Duration(round(believed * WORK)))[:300]
    assert served.count("heavy") / served.count("light") == pytest.approx(weight, rel=0.1)


def test_who_brings_less_than_its_part_is_never_moved_back():
    turns = FairQueue({"heavy": 2.0, "light": 1.0, "small": 1.0})
    shifts = {"heavy": [], "light": [], "small": []}
    for n in range(398):
        for name, every in (("heavy", 1), ("light", 1), ("small", 5)):
            if n % every == 0:
                shifts[name].append(turns.shift(name, WORK, Instant(n * WORK)))
    assert max(shifts["small"]) == 0
    last = 397 * WORK
    assert last + shifts["light"][-1] == pytest.approx(2 * (last + shifts["heavy"][-1]), rel=0.05)


def test_a_newcomer_passes_anothers_backlog():
    flood = [(Instant(0), "flood")] * 100
    served = queue(FairQueue({"flood": 1.0, "new": 1.0}), [*flood, (Instant(seconds(2)), "new")])
    waited = list(accumulate(WORK for name in served[: served.index("new")]))[-1]
    assert waited <= seconds(2) + 2 * WORK


def test_what_is_turned_away_moves_nobody_back():
    turns = FairQueue({"a": 1.0, "b": 1.0})
    for _ in range(50):
        turns.shift("a", WORK, Instant(0))
        turns.refund("a", WORK)
    assert turns.shift("a", WORK, Instant(0)) == 0


def test_no_wait_beyond_the_bound_and_none_without_weights_or_backlog():
    tenants, granted = TenantQueues({"a": 1.0, "b": 1.0}), asyncio.new_event_loop().create_future()
    tickets = [Ticket(a_request(), Footprint(1), None, Timeline(Instant(0)), granted) for _ in range(100)]
    for ticket in tickets:
        tenants.assign_delay(ticket, WORK, seconds(1), Instant(0))
    assert max(ticket.tenant_delay for ticket in tickets) == seconds(1)
    for nobody_else in ({}, {"a": 2.0}):
        assert [FairQueue(nobody_else).shift("a", WORK, Instant(n)) for n in range(3)] == [0, 0, 0]
    idle = FairQueue({"a": 1.0, "b": 1.0})
    assert {idle.shift("a", WORK, Instant(2 * n * WORK)) for n in range(10)} == {Duration(0)}


def test_the_scarcer_of_memory_and_places_says_how_long_a_request_takes_with_its_prompt():
    footprint = Footprint(base=200, per_step=0, steps=100)
    assert service_time(a_request(), footprint, PACE, 1_000, 50) == milliseconds(20 * 10 + 20)
    assert service_time(a_request(), footprint, PACE, 100_000, 50) == milliseconds(2 * 10 + 20)
    assert service_time(a_request(sequences=4), footprint, PACE, 100_000, 50) == milliseconds(8 * 10 + 20)
    assert service_time(a_request(Kind.EMBED), footprint, PACE, 100_000, 50) == milliseconds(20)


def test_a_client_that_leaves_before_its_turn_is_not_charged(bench):
    async def scenario(b):
        dispatcher = b.service.gate.dispatcher
        dispatcher.paces[Owner.LLM].observe_step(seconds(1))
        running = await b.ask()
        turns = []
        for _ in range(3):
            waiting = asyncio.create_task(b.ask())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            turns.append(dispatcher.tickets()[-1].tenant_delay)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert turns == [turns[0]] * 3
        assert turns[0] > 0
        await running.aclose()

    tenants = {
        name: {"api_keys_sha256": [key * 64], "weight": 1.0}
        for name, key in [("tests", "0"), ("others", "1")]
    }
    one_place = ScriptedGenerator(max_running=1)
    bench(scenario, generator=one_place, admission={"engine_queue": 0}, tenants=tenants)
