"""A tick that cannot apply its quotas restores the confirmed ones, is logged once, and is retried."""

import asyncio
import logging
import struct

import pytest

from backends.device.kv_memory import KvcachedMemory
from controlplane.core.clock import seconds
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.request import Owner
from controlplane.service.runtime.timers import LoopClock
from tests.controlplane.service.memory.test_quota_controller import KIB, play

LOGGER = "controlplane.service.runtime.health_tracker"
LLM_GAINS, LLM_LOSES = 896 * KIB, 608 * KIB


def own(b, llm):
    """Sets the quotas that ticks would reach by urgency."""
    b.quota_controller.owned = {Owner.LLM: llm, Owner.EMBEDDING: 1_000 * KIB - llm}
    b.quota_controller._target = llm
    b.quota_controller._moved_at = None


def in_force(b):
    """The ledger's two quotas, the engine's use ceiling and the embedder's budget, in KiB."""
    engine = b.generator.use_ceiling_bytes
    found = (b.quota(Owner.LLM), b.quota(Owner.EMBEDDING), engine, b.embedder.budget_bytes)
    return tuple(size // KIB for size in found)


def log_lines(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == LOGGER]


async def refuse():
    raise Refused("no such quota")


async def fail():
    raise BackendFailed("it broke")


@pytest.mark.parametrize("llm", [LLM_GAINS, LLM_LOSES])
@pytest.mark.parametrize(("answer", "fault"), [(refuse, "refused"), (fail, "backend_failed")])
def test_a_refused_quota_changes_nothing(llm, answer, fault, caplog):
    caplog.set_level(logging.INFO, LOGGER)

    async def scenario(b):
        b.generator.on_order = answer
        for _ in range(5):
            own(b, llm)
            await b.tick()
            assert in_force(b) == (800, 200, 800, 200)
        assert b.service.status.impaired() == {"quotas": fault}
        assert b.service.status.state()["sharing"]["health"]["fault"] == fault
        exposition = b.service.metrics_text().decode()
        assert f'tandem_quota_failures_total{{fault="{fault}"}} 5.0' in exposition
        assert [level for level, _ in log_lines(caplog)] == ["ERROR"], "logged once"
        b.generator.on_order = None
        own(b, llm)
        await b.tick()
        assert in_force(b) == (llm // KIB, 1_000 - llm // KIB) * 2
        assert b.service.status.impaired() == {}
        assert b.service.status.state()["sharing"]["health"]["fault"] is None
        assert log_lines(caplog)[1] == ("INFO", "quota changes resumed after 5 failures")
        return []

    play(scenario)


def test_failed_ticks_are_not_made_up_for():
    async def scenario(b):
        tasks = [await b.embed("e", 1, "urgent")]
        await asyncio.sleep(0.35)
        b.generator.on_order = refuse
        for _ in range(20):
            await b.tick()
            assert b.quota_controller.owned[Owner.LLM] == 800 * KIB
            await asyncio.sleep(0.05)
        b.generator.on_order = None
        await b.tick()
        assert 750 * KIB <= b.generator.quota_bytes < 800 * KIB, "one step"
        return tasks

    play(scenario)


def test_a_failure_lasts_until_the_engine_confirms_a_quota():
    async def scenario(b):
        b.generator.on_order = refuse
        own(b, LLM_LOSES)
        await b.tick()
        own(b, 800 * KIB)
        await b.tick()
        assert b.service.status.impaired() == {"quotas": "refused"}
        return []

    play(scenario)


def test_a_failed_quota_change_preempts_nothing():
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 320) for n in range(2)]
        await b.generator.until_runs(2)
        b.generator.allow(1)
        await asyncio.sleep(0.01)
        tasks += [await b.embed("first", 4, "urgent"), await b.embed("second", 4, "urgent")]
        b.generator.on_order = refuse
        for _ in range(10):
            await asyncio.sleep(0.01)
            own(b, LLM_LOSES)
            await b.tick()
        assert b.service.status.impaired() and b.quota_controller.reclaimed_bytes == 0
        b.generator.on_order = None
        return [asyncio.create_task(quiet(task)) for task in tasks]

    async def quiet(task):
        await asyncio.gather(task, return_exceptions=True)

    play(scenario, most_batch_tokens=800)


@pytest.mark.parametrize("llm", [LLM_GAINS, LLM_LOSES])
def test_an_unresponsive_engine_does_not_block_later_ticks(llm):
    async def scenario(b):
        b.generator.on_order = asyncio.Event().wait
        own(b, llm)
        await b.tick()
        assert b.service.status.impaired() == {"quotas": "backend_down"}
        # It may have applied the quota: memory that it may hold belongs to no other owner.
        most = max(llm, 800 * KIB)
        assert b.quota(Owner.LLM) == 800 * KIB
        assert b.embedder.budget_bytes == b.quota(Owner.EMBEDDING) == 1_000 * KIB - most
        b.generator.on_order = None
        own(b, 800 * KIB)
        await b.tick()
        assert in_force(b) == (800, 200, 800, 200) and b.service.status.impaired() == {}
        return []

    play(scenario)


def test_withheld_memory_counts_while_quota_changes_fail():
    async def scenario(b):
        b.generator.on_order = refuse
        b.quota_controller.withheld = 50 * KIB
        own(b, LLM_LOSES)
        await b.tick()
        assert in_force(b) == (800, 150, 800, 150)
        b.generator.on_order = None
        return []

    play(scenario)


@pytest.mark.parametrize(
    ("withheld", "llm", "embedding"), [(50, 800, 150), (180, 720, 100), (9_000, 592, 100)]
)
def test_withheld_memory_starves_no_kind_of_request(withheld: int, llm: int, embedding: int):
    """An embedding input takes up to 100 KiB; the LLM keeps the 600 that embeddings could not use."""

    async def scenario(b):
        b.quota_controller.withhold(withheld * KIB)
        for _ in range(3):
            b.quota_controller._moved_at = None
            await b.tick()
        assert in_force(b) == (llm, embedding, llm, embedding)
        # They end while the memory is withheld.
        return [await b.embed("e", 1), await b.ask("a", 100)]

    play(scenario)


async def restarted(b):
    end = LoopClock().now() + seconds(600)
    while b.service._supervisors[0].rejection() is not None:
        assert LoopClock().now() < end
        await asyncio.sleep(0.1)


def test_a_restarted_engine_gets_its_quota_again():
    async def scenario(b):
        own(b, LLM_LOSES)
        await b.tick()
        loaded = asyncio.Event()
        b.generator.on_start = loaded.wait
        b.generator.die()
        for _ in range(3):
            own(b, LLM_LOSES)
            await b.tick()
        assert b.service.status.impaired() == {"quotas": "backend_down"}
        loaded.set()
        await restarted(b)
        assert in_force(b) == (608, 392, 608, 392), "before the next tick"
        own(b, LLM_LOSES)
        await b.tick()
        assert in_force(b) == (608, 392, 608, 392) and b.service.status.impaired() == {}
        # Also if no tick ran while the engine was down.
        b.generator.die()
        await restarted(b)
        assert b.generator.quota_bytes == LLM_LOSES
        return []

    play(scenario)


def test_an_engine_that_refuses_its_quota_gets_no_requests():
    async def scenario(b):
        own(b, LLM_LOSES)
        await b.tick()
        b.generator.die()
        b.generator.on_order = refuse
        await asyncio.sleep(0.5)
        own(b, LLM_LOSES)
        await b.tick()
        assert in_force(b) == (608, 392, 900, 392), "it is stopped"
        with pytest.raises(BackendDown):
            await b.service.check()
        b.generator.on_order = None
        await restarted(b)
        own(b, LLM_LOSES)
        await b.tick()
        assert in_force(b) == (608, 392, 608, 392)
        return []

    play(scenario)


UNIT = 4 * KIB


@pytest.mark.parametrize("llm", [LLM_GAINS, LLM_LOSES])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_limit_changed_by_another_program_suspends_quota_changes(tmp_path, llm, is_gone):
    segment = tmp_path / "segment"
    segment.write_bytes(struct.pack("=qqq", 1_000 * KIB, 0, 0))
    memory = KvcachedMemory(segment, pool_bytes=1_000 * KIB, unit_bytes=UNIT)

    async def scenario(b):
        assert memory.read().total == 800 * KIB
        if is_gone:
            segment.unlink()
        else:
            segment.write_bytes(struct.pack("=qqq", 700 * KIB, 0, 0))
        for _ in range(3):
            own(b, llm)
            await b.tick()
            assert in_force(b) == (800, 200, 800, 200)
        assert b.service.status.impaired() == {"quotas": "os_error" if is_gone else "limit_conflict"}
        segment.write_bytes(struct.pack("=qqq", 800 * KIB, 0, 0))
        own(b, llm)
        await b.tick()
        assert b.service.status.impaired() == {}
        assert in_force(b) == (llm // KIB, 1_000 - llm // KIB) * 2
        assert memory.read().total == llm
        return []

    play(scenario, memory=memory)


def test_a_refused_quota_restores_the_memory_limit(tmp_path):
    segment = tmp_path / "segment"
    segment.write_bytes(struct.pack("=qqq", 1_000 * KIB, 0, 0))
    memory = KvcachedMemory(segment, pool_bytes=1_000 * KIB, unit_bytes=UNIT)

    async def scenario(b):
        b.generator.on_order = refuse
        for llm in (LLM_GAINS, LLM_LOSES):
            own(b, llm)
            await b.tick()
            assert memory.read().total == 800 * KIB
            assert in_force(b) == (800, 200, 800, 200)
        b.generator.on_order = None
        return []

    play(scenario, memory=memory)


def test_a_defect_is_logged_with_its_traceback(caplog):
    async def scenario(b):
        load, b.quota_controller.demand.load = b.quota_controller.demand.load, None
        await b.tick()
        await b.tick()
        assert b.service.status.impaired() == {"quotas": "defect"}
        (record,) = [record for record in caplog.records if record.name == LOGGER]
        assert record.exc_info is not None
        b.quota_controller.demand.load = load
        return []

    play(scenario)


def test_the_limit_that_a_restarted_engine_has_written_is_accepted(tmp_path):
    segment = tmp_path / "segment"
    segment.write_bytes(struct.pack("=qqq", 1_000 * KIB, 0, 0))
    memory = KvcachedMemory(segment, pool_bytes=1_000 * KIB, unit_bytes=UNIT)

    async def scenario(b):
        async def load():
            segment.write_bytes(struct.pack("=qqq", 1_000 * KIB, 0, 0))

        b.generator.on_start = load
        b.generator.die()
        await restarted(b)
        assert memory.read().total == 800 * KIB
        await b.tick()
        assert b.service.status.impaired() == {}
        return []

    play(scenario, memory=memory)
