"""Tenants with work get their weight's part; one that comes new does not wait behind another's backlog."""

import asyncio
from itertools import accumulate

import pytest

from backends.scripted import ScriptedGenerator
from controlplane.core.clock import Duration, Instant, seconds
from controlplane.core.request import Owner
from controlplane.service.turns import Turns

WORK, MOST = seconds(0.1), seconds(1_000)


def queue(turns, arrivals):
    """Names in the order of first come first served, moved back by their turns."""
    ranked = [(at + turns.shift(name, WORK, at), n, name) for n, (at, name) in enumerate(arrivals)]
    return [name for _, _, name in sorted(ranked)]


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_two_that_each_ask_for_everything_share_by_weight(weight):
    arrivals = [(Instant(n * WORK), name) for n in range(400) for name in ("heavy", "light")]
    served = queue(Turns({"heavy": weight, "light": 1.0}, MOST), arrivals)[:300]
    assert served.count("heavy") / served.count("light") == pytest.approx(weight, rel=0.15)


def test_a_newcomer_passes_anothers_backlog():
    flood = [(Instant(0), "flood")] * 100
    served = queue(Turns({"flood": 1.0, "new": 1.0}, MOST), [*flood, (Instant(seconds(2)), "new")])
    waited = list(accumulate(WORK for name in served[: served.index("new")]))[-1]
    assert waited <= seconds(2) + 2 * WORK


def test_what_is_turned_away_moves_nobody_back():
    turns = Turns({"a": 1.0, "b": 1.0}, MOST)
    for _ in range(50):
        turns.shift("a", WORK, Instant(0))
        turns.give_back("a", WORK)
    assert turns.shift("a", WORK, Instant(0)) == 0


def test_no_wait_beyond_the_bound_and_none_without_weights_or_backlog():
    bounded = Turns({"a": 1.0, "b": 1.0}, seconds(1))
    assert max(bounded.shift("a", WORK, Instant(0)) for _ in range(100)) == seconds(1)
    assert [Turns({}, MOST).shift("a", WORK, Instant(n)) for n in range(3)] == [0, 0, 0]
    idle = Turns({"a": 1.0, "b": 1.0}, MOST)
    assert {idle.shift("a", WORK, Instant(2 * n * WORK)) for n in range(10)} == {Duration(0)}


def test_a_client_that_leaves_before_its_turn_is_not_charged(bench):
    async def scenario(b):
        dispatcher = b.service.dispatcher
        dispatcher.paces[Owner.LLM].observe_step(seconds(1))
        running = await b.ask()
        turns = []
        for _ in range(3):
            waiting = asyncio.create_task(b.ask())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            turns.append(dispatcher.tickets()[-1].turn)
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
