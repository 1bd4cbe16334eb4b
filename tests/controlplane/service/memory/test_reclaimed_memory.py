"""Memory that is reclaimed for embeddings, by preempting generations."""

import asyncio
from dataclasses import replace

import pytest

from tests.controlplane.service.memory.test_quota_controller import KIB, play


def test_memory_is_not_reclaimed_again_before_the_engine_reports_it_free():
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 320) for n in range(2)]
        await b.generator.until_runs(2)
        b.generator.allow(1)
        await asyncio.sleep(0.01)
        tasks += [await b.embed("first", 4, "urgent"), await b.embed("second", 4, "urgent")]
        for _ in range(5):
            await asyncio.sleep(0.01)
            await b.tick()
        controller, report = b.quota_controller, b.generator.state()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(b.generator, "state", lambda: report)
            patched.setattr(b.service.gate.dispatcher, "reclaim", lambda needed, priority: 7)
            for _ in range(4):
                controller._reclaim(608 * KIB, report)
            assert controller.reclaimed_bytes == 7
            for number in range(3):
                controller._reclaim(608 * KIB, replace(report, preemptions=number))
            assert controller.reclaimed_bytes == 14
        return [asyncio.create_task(quiet(t)) for t in tasks]

    async def quiet(task):
        await asyncio.gather(task, return_exceptions=True)

    play(scenario, most_batch_tokens=800)
