"""Memory is reserved before a worker loads, and free again when a worker has left."""

import asyncio

import pytest

from controlplane.config import ConfigError
from tests.controlplane.service.worker_bench import KIB, MOVING, ONE, QUOTA, TOKENS, TWO, WEIGHTS, Bench, play


def test_memory_is_reserved_before_a_worker_loads_and_free_after_the_old_one_left():
    async def scenario(bench: Bench) -> None:
        seen = []

        async def load() -> None:
            seen.append(bench.quota)

        bench.load = load
        change = await bench.put({"embeddings": [{"model": "a", "max_running": 8}]})
        assert seen == [QUOTA - WEIGHTS - TOKENS * KIB]
        assert change.to_json()["workers"] == {
            "models": {"a": {"action": "replace", "weight_bytes": WEIGHTS, "workspace_bytes": TOKENS * KIB}},
            "reserved_bytes": WEIGHTS + TOKENS * KIB,
            "reservable_bytes": QUOTA - 20 * KIB,
        }
        await asyncio.sleep(0.1)
        assert bench.quota == QUOTA
        await bench.put(TWO)
        # The second model's weights are not in the plan of the start.
        await asyncio.sleep(0.1)
        assert bench.quota == QUOTA - WEIGHTS
        await bench.put(ONE)
        await asyncio.sleep(0.1)
        assert bench.quota == QUOTA

    play(scenario)


def test_a_load_waits_for_workers_whose_budget_is_cut():
    """With 120 KiB left of 420 the present worker may not take the 200 KiB of its largest pass."""

    async def scenario(bench: Bench) -> None:
        seen = []

        async def load() -> None:
            seen.append([task.done() for task in asking])

        bench.load = load
        asking = [asyncio.create_task(bench.embed(f"n{number}", "a")) for number in range(4)]
        await asyncio.sleep(0.01)
        await bench.put({"embeddings": [{"model": "a", "max_running": 5}]})
        assert seen == [[True] * 4]
        assert bench.built[0].budget_bytes < bench.built[0].workspace_bytes
        await asyncio.gather(*asking)

    play(scenario, quota=420 * KIB)


def test_a_worker_that_does_not_fit_is_refused():
    async def scenario(bench: Bench) -> None:
        for is_dry_run in (True, False):
            with pytest.raises(ConfigError, match=r"takes 307,200 bytes .* has 286,720; lower batch_tokens"):
                await bench.put(TWO, is_dry_run=is_dry_run)
        assert len(bench.built) == 1
        assert bench.service.reconfiguration.active.number == 1
        assert "286,720" in bench.service.reconfiguration.to_json()["last_failure"]["error"]
        assert bench.quota == 300 * KIB

    play(scenario, quota=300 * KIB)


def test_a_worker_that_turns_out_too_large_is_stopped():
    async def scenario(bench: Bench) -> None:
        bench.batch_tokens = 2 * TOKENS
        with pytest.raises(ConfigError, match="the largest batches take 614,400 bytes"):
            await bench.put(TWO)
        assert bench.built[-1].is_stopped
        assert (list(bench.service.encoders), bench.quota) == (["a"], 600 * KIB)

    play(scenario, quota=600 * KIB)


def test_a_change_after_another_waits_for_the_memory_of_workers_that_are_leaving():
    async def scenario(bench: Bench) -> None:
        asking = [asyncio.create_task(bench.embed(f"n{number}", "a")) for number in range(100)]
        bench.load = lambda: asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await bench.put({"embeddings": [{"model": "a", "dimensions": [4]}]})
        assert bench.service.encoders.leaving
        await bench.put({"embeddings": [{"model": "a", "dimensions": [2]}]})
        assert all(task.done() for task in asking)
        await asyncio.sleep(0.1)
        assert [each.is_stopped for each in bench.built] == [True, True, False]

    play(scenario, quota=420 * KIB)


def test_moving_quotas_give_the_memory_and_get_it_back():
    async def scenario(bench: Bench) -> None:
        quotas = bench.service.quota_controller
        seen = []

        async def load() -> None:
            await asyncio.sleep(2.0)
            free = quotas.pool.memory.pool_bytes - bench.quota - quotas.engine.ceiling
            seen.append((quotas.reserved, free))

        bench.load = load
        asking = [asyncio.create_task(bench.embed(f"n{number}", "a")) for number in range(200)]
        await bench.put({**MOVING["models"], **TWO})
        [(reserved, free)] = seen
        assert reserved == WEIGHTS + TOKENS * KIB <= free
        assert (await bench.embed("b", "b")).ticket.embedder is bench.built[-1]
        await asyncio.gather(*asking)
        await bench.put(MOVING["models"])
        await asyncio.sleep(5.0)
        assert (quotas.reserved, list(bench.service.encoders)) == (0, ["a"])
        assert bench.quota + quotas.engine.ceiling <= quotas.pool.memory.pool_bytes

    play(scenario, MOVING)
