"""Changing quotas on virtual time, with scripted engines and with a simulated device."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest

from backends.cost_models.step_time import affine, embedding_line, llm_only, sequential
from backends.device.kv_memory import ElasticMemory
from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from benchmark_control_plane.simulator.simulated_machine import Machine
from benchmark_control_plane.simulator.simulation import SimulatedEmbedding, SimulatedRequest, simulate
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import ConfigError, parse
from controlplane.core.generation import Sampling
from controlplane.core.request import Owner
from controlplane.service.bootstrap import build_service
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.runtime.timers import LoopClock
from controlplane.service.service import Service

CLASSES = {
    "urgent": {"priority": 5, "ttft_ms": 400, "e2e_ms": 400},
    "standard": {"priority": 1, "default": True, "sheddable": False},
}
MODELS = {"chat": {"model": "scripted"}, "embeddings": [{"model": "scripted-embeddings"}]}
POOL = {"kv_allocator": "kvcached"}
QUOTA = {
    "llm": {"nominal": 0.8, "min": 0.5, "borrow": 0.1, "lend": 0.0},
    "embedding": {"nominal": 0.2, "min": 0.1, "borrow": 0.0, "lend": 0.1},
}
KIB = 1_024


class NoTicks:
    """A timer that never fires; the test calls `tick`."""

    def schedule_periodic(self, seconds, work):
        pass

    def stop(self):
        pass


@dataclass
class Bench:
    service: Service
    generator: ScriptedGenerator
    embedder: ScriptedEmbedder

    @property
    def quota_controller(self) -> QuotaController:
        return self.service.quota_controller

    async def tick(self) -> None:
        await self.quota_controller.tick_now()

    def quota(self, owner: Owner) -> int:
        return self.service.gate.dispatcher.ledger.quota(owner)

    async def ask(self, name: str, prompt_tokens: int, service_class: str = "standard"):
        job = await self.service.intake.completion(
            RequestOrigin(name, Caller("t"), RequestHints(service_class=service_class)),
            self.generator.model, "x" * prompt_tokens, max_tokens=50, sampling=Sampling(max_tokens=50),
        )  # fmt: skip
        answer = await self.service.gate.generate(job)

        async def read() -> None:
            async for _ in answer:
                pass

        return asyncio.create_task(read())

    async def embed(self, name: str, inputs: int, service_class: str = "standard"):
        origin = RequestOrigin(name, Caller("t"), RequestHints(service_class=service_class))
        job = await self.service.intake.embeddings(origin, self.embedder.model, ["x" * 100] * inputs)
        return asyncio.create_task(self.service.gate.embed(job))


def play(scenario, *, quota=QUOTA, most_batch_tokens=400, kv_kib=900, memory=None, others=()):
    """Runs a scenario on a pool of 1,000 KiB; a token of either kind takes 1 KiB, the largest batch 400."""

    async def main():
        generator = ScriptedGenerator(
            kv_bytes=kv_kib * KIB, max_model_tokens=400, has_tandem_scheduler=True, is_stepped=True
        )
        embedder = ScriptedEmbedder(
            batch_tokens=most_batch_tokens, max_input_tokens=100, is_stepped=True, bytes_per_token=KIB
        )
        service = build_service(
            parse({"models": MODELS, "pool": POOL, "classes": CLASSES, "quota": quota}),
            [generator], [embedder, *others], workspace_bytes=400 * KIB, clock=LoopClock(), ticks=NoTicks(),
            device_memory=lambda: memory or ElasticMemory(1_000 * KIB, kv_kib * KIB),
        )  # fmt: skip
        await service.start()
        bench = Bench(service, generator, embedder)
        tasks = await scenario(bench)
        generator.allow(1_000)
        embedder.allow(1_000)
        while service.gate.tickets():
            generator.allow(100)
            embedder.allow(100)
            await bench.tick()
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        service.gate.dispatcher.ledger.check_integrity()
        await service.stop()

    run(main())


def test_nominal_quotas_are_in_force_from_the_start():
    async def scenario(b):
        assert b.generator.quota_bytes == b.quota(Owner.LLM) == 800 * KIB
        assert b.embedder.budget_bytes == b.quota(Owner.EMBEDDING) == 200 * KIB
        return []

    play(scenario)


def test_urgent_embeddings_gain_quota_by_bounded_steps_and_return_it():
    async def scenario(b):
        tasks = [await b.embed("e", 1, "urgent")]
        await b.tick()
        await asyncio.sleep(0.35)
        b.quota_controller._moved_at = LoopClock().now()
        seen = []
        for _ in range(12):
            await b.tick()
            seen.append(b.generator.quota_bytes // KIB)
            assert b.generator.use_ceiling_bytes + b.embedder.budget_bytes <= 1_000 * KIB
            await asyncio.sleep(0.05)
        assert seen[0] == 800 and min(seen) < 700
        assert all(before - after <= 50 for before, after in pairwise(seen))
        b.embedder.allow(10)
        await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0.05)
            await b.tick()
        assert abs(b.generator.quota_bytes - 800 * KIB) <= 16 * KIB
        return tasks

    play(scenario)


async def given_up(waiting):
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_memory_that_embeddings_do_not_need_is_lent_and_returned():
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 250) for n in range(2)]
        waiting = asyncio.create_task(b.ask("last", 250))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await b.tick()
        assert (b.quota(Owner.LLM), b.quota(Owner.EMBEDDING)) == (896 * KIB, 104 * KIB)
        tasks.append(await b.embed("e", 4))
        await asyncio.sleep(0)
        await b.tick()
        # The four inputs need the whole quota of the embeddings.
        assert b.quota(Owner.EMBEDDING) == b.embedder.budget_bytes == 200 * KIB
        await given_up(waiting)
        return tasks

    play(scenario)


def test_a_deferral_for_memory_brings_an_early_tick():
    async def scenario(b):
        tasks = [await b.embed(f"e{n}", 2) for n in range(2)]
        await asyncio.sleep(1)
        before = b.quota_controller._last_tick
        tasks.append(await b.embed("last", 2))
        await asyncio.sleep(0)
        assert len(b.service.gate.dispatcher.queued(Owner.EMBEDDING)) == 1
        await asyncio.sleep(0.01)
        assert b.quota_controller._last_tick != before
        assert b.quota(Owner.EMBEDDING) > 200 * KIB
        return tasks

    play(scenario, quota={"llm": {"nominal": 0.8}, "embedding": {"nominal": 0.2}})


def test_a_quota_below_use_preempts_nothing_without_waiting_embeddings():
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 320) for n in range(2)]
        await b.generator.until_runs(2)
        b.generator.allow(1)
        await asyncio.sleep(0.01)
        b.quota_controller.owned = {Owner.LLM: 608 * KIB, Owner.EMBEDDING: 392 * KIB}
        await b.tick()
        used = b.generator.state().used_bytes
        assert b.quota(Owner.LLM) == b.generator.quota_bytes < used <= b.generator.use_ceiling_bytes
        assert b.embedder.budget_bytes + b.generator.use_ceiling_bytes <= 1_000 * KIB
        assert b.quota_controller.reclaimed_bytes == 0
        await asyncio.sleep(0.01)
        assert [run.is_preempted for run in b.generator.runs] == [False, False]
        return tasks

    play(scenario, quota={**QUOTA, "llm": {"nominal": 0.8, "min": 0.5, "borrow": 0.0}})


def test_the_use_ceiling_follows_ending_answers_down_to_the_quota():
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 130) for n in range(4)]
        await b.generator.until_runs(4)
        b.generator.allow(40)
        await asyncio.sleep(0.01)
        former, seen = b.generator.use_ceiling_bytes, []
        for ending in b.generator.live[:3]:
            for _ in range(2):
                b.quota_controller.owned = {Owner.LLM: 512 * KIB, Owner.EMBEDDING: 488 * KIB}
                b.quota_controller._moved_at = None
                await b.tick()
                state = b.generator.state()
                assert b.generator.quota_bytes == 512 * KIB
                assert state.used_bytes <= b.generator.use_ceiling_bytes <= former
                assert b.generator.use_ceiling_bytes + b.embedder.budget_bytes <= 1_000 * KIB
                assert b.embedder.budget_bytes <= 100 * KIB + state.ceded_bytes
                former = b.generator.use_ceiling_bytes
            seen.append(former // KIB)
            b.generator.allow(60, request_id=ending.request.id)
            await asyncio.sleep(0.01)
        assert 800 >= seen[0] > seen[1] > seen[2] == 512
        assert not [t for t in b.service.gate.tickets() if t.preemptions]
        return tasks

    play(scenario, quota={**QUOTA, "llm": {"nominal": 0.8, "min": 0.5, "borrow": 0.0}}, most_batch_tokens=800)


@pytest.mark.parametrize(("service_class", "is_preempted"), [("urgent", True), ("standard", False)])
def test_generations_are_preempted_only_for_embeddings_of_higher_priority(service_class, is_preempted):
    async def scenario(b):
        tasks = [await b.ask(f"r{n}", 320) for n in range(2)]
        await b.generator.until_runs(2)
        b.generator.allow(1)
        await asyncio.sleep(0.01)
        tasks += [await b.embed("first", 4, service_class), await b.embed("second", 4, service_class)]
        for _ in range(60):
            await asyncio.sleep(0.01)
            b.quota_controller.owned = {Owner.LLM: 608 * KIB, Owner.EMBEDDING: 392 * KIB}
            await b.tick()
        preempted = [t for t in b.service.gate.tickets() if t.preemptions]
        assert bool(preempted) == is_preempted
        assert (b.quota_controller.reclaimed_bytes > 0) == is_preempted
        return [asyncio.create_task(quiet(t)) for t in tasks]

    async def quiet(task):
        await asyncio.gather(task, return_exceptions=True)

    # Two such requests exceed their nominal 200 KiB.
    play(scenario, most_batch_tokens=800)


def test_the_llm_waits_for_the_batch_in_flight():
    async def scenario(b):
        b.quota_controller.owned = {Owner.LLM: 608 * KIB, Owner.EMBEDDING: 392 * KIB}
        await b.tick()
        tasks = [await b.embed("e", 3)]
        await b.embedder.until_runs(1)
        await asyncio.sleep(0.01)
        # 300 tokens are forwarded; the lease covers the half that may be in flight.
        b.quota_controller.owned = {Owner.LLM: 896 * KIB, Owner.EMBEDDING: 104 * KIB}
        await b.tick()
        assert b.embedder.budget_bytes == 104 * KIB
        assert b.quota(Owner.LLM) <= 1_000 * KIB - 150 * KIB
        b.embedder.allow(10)
        await asyncio.gather(*tasks)
        b.quota_controller.owned = {Owner.LLM: 896 * KIB, Owner.EMBEDDING: 104 * KIB}
        await b.tick()
        assert b.quota(Owner.LLM) == 896 * KIB
        return tasks

    play(scenario)


def test_each_of_two_models_can_hold_its_longest_input():
    small = ScriptedEmbedder(model="small", batch_tokens=100, max_input_tokens=100, bytes_per_token=KIB)

    async def scenario(b):
        assert (small.budget_bytes, b.embedder.budget_bytes) == (100 * KIB, 100 * KIB)
        b.quota_controller.owned = {Owner.LLM: 608 * KIB, Owner.EMBEDDING: 392 * KIB}
        b.quota_controller._target = 608 * KIB
        await b.tick()
        assert (small.budget_bytes, b.embedder.budget_bytes) == (100 * KIB, 292 * KIB)
        return []

    play(scenario, quota={**QUOTA, "embedding": {"nominal": 0.2, "min": 0.2}}, others=[small])


def test_a_dead_engine_leaves_the_quotas_unchanged():
    async def scenario(b):
        b.generator.die()
        await b.tick()
        assert b.quota(Owner.LLM) == 800 * KIB
        await b.generator.start()
        await b.tick()
        return []

    play(scenario)


def test_state_and_metrics_show_the_sharing():
    async def scenario(b):
        await b.tick()
        shown = b.service.status.state()["sharing"]
        assert shown["device_memory"] == "elastic"
        assert sum(shown["usable_bytes"].values()) == shown["pool_bytes"] == 1_000 * KIB
        text = b.service.metrics_text().decode()
        assert 'tandem_quota_before_lending_bytes{owner="llm"} 819200.0' in text
        assert 'tandem_urgency{owner="embedding"} 0.0' in text
        return []

    play(scenario)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding": {"nominal": 0.2, "min": 0.05}}, "quota.embedding.min gives"),
        ({"llm": {"nominal": 0.8, "min": 0.2}}, "quota.llm.min gives"),
    ],
)
def test_minimums_must_hold_a_single_request(change, message):
    async def scenario(b):
        return []

    with pytest.raises(ConfigError, match=message):
        play(scenario, quota={**QUOTA, **change}, most_batch_tokens=800, kv_kib=992)


MACHINE = Machine(
    sequential(llm_only(affine(0.01, 5e-5, 2e-4, 0)), embedding_line(0.002, 2e-6)),
    kv_bytes=900 * KIB,
    max_model_tokens=400,
    embed_batch_tokens=300,
    embed_input_tokens=100,
    embed_bytes_per_token=KIB,
    pool_bytes=1_000 * KIB,
)


def mixed():
    """A steady stream of chats, and embeddings in bursts."""
    chats = [SimulatedRequest(0.02 * n, 50 + n % 7 * 20, 20 + n % 5 * 10, 100) for n in range(150)]
    bursts = [SimulatedEmbedding(0.5 * (n // 20) + 0.001 * n, (60,) * 4, "urgent") for n in range(100)]
    return chats + bursts


@pytest.mark.long
def test_a_shared_device_never_overflows_and_serves_every_request():
    sections = {"classes": CLASSES, "quota": QUOTA, "scheduling": {"engine": {}}}
    course = simulate(mixed(), MACHINE, sections)
    assert course.memory.overflows == course.memory.failed_batches == 0
    assert 700 * KIB < course.memory.peak <= 1_000 * KIB
    assert all(r.outcome in ("met", "late") or r.outcome.startswith("rejected") for r in course.records)
    assert simulate(mixed(), MACHINE, sections).trace_hash == course.trace_hash


def test_capped_footprints_survive_a_change_of_policies():
    async def scenario(bench):
        dispatcher = bench.service.gate.dispatcher
        tasks = [await bench.embed(name, 4) for name in ("runs", "waits")]
        await bench.embedder.until_runs(1)
        dispatcher.ledger.set_quota(Owner.EMBEDDING, 100 * KIB)
        dispatcher.cap_footprints(Owner.EMBEDDING, 100 * KIB)
        await bench.service.reconfiguration.change({"scheduling": {"ordering": "fcfs"}}, source="test")
        assert [one.footprint.worst for one in dispatcher.queued(Owner.EMBEDDING)] == [100 * KIB]
        return tasks

    play(scenario)
