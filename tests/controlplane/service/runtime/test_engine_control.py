"""A change that the engine does not confirm fails, leaves the gate unchanged, and can be repeated."""

import asyncio
from dataclasses import asdict

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.policy.engine.options import EngineOptions

EDF = {"scheduling": {"engine": {"ordering": "edf"}}}
TO_SRMT = {"scheduling": {"engine": {"ordering": "srmt"}}, "admission": {"max_waiting": 7}}


def in_force(b):
    """Ordering and admission of the gate, and the engine's options."""
    now = b.service.config
    return now.scheduling.engine["ordering"], now.admission.max_waiting, dict(b.generator.options)


@pytest.fixture
def play(bench):
    return lambda scenario: bench(scenario, generator=ScriptedGenerator(has_tandem_scheduler=True), **EDF)


def test_an_unresponsive_engine_fails_a_change_and_gets_all_options_next(play):
    async def scenario(b):
        before = in_force(b)
        b.generator.on_order = asyncio.Event().wait
        message = r"did not confirm its new options within 15 s; the gate keeps .* may still apply these"
        with pytest.raises(BackendDown, match=message):
            await b.service.reconfiguration.change(TO_SRMT, source="test")
        assert in_force(b) == before
        b.generator.on_order = None
        await b.service.reconfiguration.change({"admission": {"max_waiting": 5}}, source="test")
        assert in_force(b) == ("edf", 5, asdict(EngineOptions(ordering="edf")))
        await b.service.reconfiguration.change({"scheduling": {"engine": {"urgency": 0.75}}}, source="test")
        assert b.generator.options["urgency"] == 0.75

    play(scenario)


def test_an_engine_that_dies_during_a_change_changes_nothing(play):
    async def scenario(b):
        before = in_force(b)
        ordered, dead = asyncio.Event(), asyncio.Event()

        async def die():
            ordered.set()
            await dead.wait()
            b.generator.die()

        b.generator.on_order = die
        change = asyncio.create_task(b.service.reconfiguration.change(TO_SRMT, source="test"))
        await ordered.wait()
        dead.set()
        with pytest.raises(BackendDown, match="died; neither the engine nor the gate was changed"):
            await change
        assert in_force(b) == before
        await b.generator.start()

    play(scenario)


@pytest.mark.parametrize("error", [Refused("no"), BackendFailed("it broke")], ids=["refused", "failed"])
def test_options_refused_by_the_engine_do_not_reach_the_gate(play, error):
    async def refuse():
        raise error

    async def scenario(b):
        before = in_force(b)
        b.generator.on_order = refuse
        with pytest.raises(type(error)):
            await b.service.reconfiguration.change(TO_SRMT, source="test")
        assert in_force(b) == before
        b.generator.on_order = None
        await b.service.reconfiguration.change(TO_SRMT, source="test")
        assert in_force(b) == ("srmt", 7, asdict(EngineOptions(ordering="srmt")))

    play(scenario)


def test_concurrent_changes_are_applied_one_after_another(play):
    async def scenario(b):
        may_go = asyncio.Event()
        b.generator.on_order = may_go.wait
        changes = {"scheduling": {"engine": {"urgency": 0.75}}}, {"admission": {"max_waiting": 5}}
        first, second = (
            asyncio.create_task(b.service.reconfiguration.change(change, source="test")) for change in changes
        )
        await asyncio.sleep(1)
        may_go.set()
        await asyncio.gather(first, second)
        assert in_force(b) == ("edf", 5, {"urgency": 0.75})
        assert b.service.config.scheduling.engine["urgency"] == 0.75

    play(scenario)
