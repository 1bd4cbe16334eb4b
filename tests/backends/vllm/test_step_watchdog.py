"""Only an engine that has requests can be late with a step."""

import asyncio
import subprocess
import sys
from contextlib import contextmanager

import pytest

from backends.vllm.step_watchdog import StepWatchdog, longest_step
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.ports import StepCost


@contextmanager
def living():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        yield engine
        engine.kill()


def lost_at(scenario, *, longest_seconds: float = 0.0) -> float | None:
    """When an engine that may be silent for 160 s, and so for 16 beats of 10 s, was killed in the scenario's
    first 1,000 s. A beat more if it happened to wait for a core, which is real time."""

    async def main(engine):
        loop, requests, lost = asyncio.get_running_loop(), set(), asyncio.get_running_loop().create_future()
        watch = StepWatchdog(
            [engine],
            stall_seconds=160,
            longest_seconds=longest_seconds,
            is_idle=lambda: not requests,
            on_killed=lambda: lost.set_result(loop.time()),
        )
        playing = asyncio.create_task(scenario(requests, watch))
        await asyncio.wait({lost}, timeout=1_000)
        await playing
        watch.end()
        if not lost.done():
            assert engine.poll() is None
            return None
        assert engine.wait() < 0
        return lost.result()

    with living() as engine:
        return run(main(engine))


async def ask(requests, watch):
    requests.add("one")


def test_an_engine_that_never_steps_is_killed():
    assert lost_at(ask) in (170, 180)


def test_a_step_may_be_as_long_as_it_should_be():
    assert lost_at(ask, longest_seconds=500) in (510, 520)


def test_an_idle_engine_rests_as_long_as_it_likes():
    async def scenario(requests, watch):
        pass

    assert lost_at(scenario) is None


def test_an_engine_that_steps_lives():
    async def scenario(requests, watch):
        requests.add("one")
        for _ in range(8):
            await asyncio.sleep(150)
            watch.step_finished()

    assert lost_at(scenario) is None


def test_clients_that_lose_patience_first_do_not_hide_an_engine_that_hangs():
    async def scenario(requests, watch):
        for _ in range(4):
            requests.add("one")
            await asyncio.sleep(55)
            requests.clear()
            await asyncio.sleep(55)

    # At 335 s the fourth client is there; of the beats until 380 s sixteen or more saw one.
    assert 300 < lost_at(scenario) < 400


def test_the_longest_step_reads_decodes_and_looks_back_as_much_as_may_be():
    cost = StepCost(step=1.0, decode=0.1, cell=0.01, prompt_token=0.001)
    assert longest_step(cost, prompt_tokens=2_000, sequences=10, cells=100) == pytest.approx(1 + 1 + 1 + 2)
    assert longest_step(None, prompt_tokens=2_000, sequences=10, cells=100) == 0
