"""The watchdog kills an engine that has requests but takes no step."""

import asyncio
import subprocess
import sys
from contextlib import contextmanager

import pytest

from backends.vllm.step_watchdog import StepWatchdog, longest_step
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.engine_reports import StepCost


@contextmanager
def running_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        yield engine
        engine.kill()


def killed_at(scenario, *, longest_seconds: float = 0.0) -> float | None:
    """Time at which an engine with a stall limit of 160 s (16 beats of 10 s) was killed, within 1,000 s.

    It is one beat later if the engine process waited for a core, which is measured in real time.
    """

    async def main(engine):
        loop, requests, killed = asyncio.get_running_loop(), set(), asyncio.get_running_loop().create_future()
        watchdog = StepWatchdog(
            [engine],
            stall_seconds=160,
            longest_seconds=longest_seconds,
            is_idle=lambda: not requests,
            on_killed=lambda: killed.set_result(loop.time()),
        )
        playing = asyncio.create_task(scenario(requests, watchdog))
        await asyncio.wait({killed}, timeout=1_000)
        await playing
        watchdog.stop()
        if not killed.done():
            assert engine.poll() is None
            return None
        assert engine.wait() < 0
        return killed.result()

    with running_process() as engine:
        return run(main(engine))


async def ask(requests, watchdog):
    requests.add("one")


def test_an_engine_that_never_steps_is_killed():
    assert killed_at(ask) in (170, 180)


def test_a_step_may_take_its_predicted_longest_time():
    assert killed_at(ask, longest_seconds=500) in (510, 520)


def test_an_idle_engine_is_not_killed():
    async def scenario(requests, watchdog):
        pass

    assert killed_at(scenario) is None


def test_an_engine_that_takes_steps_is_not_killed():
    async def scenario(requests, watchdog):
        requests.add("one")
        for _ in range(8):
            await asyncio.sleep(150)
            watchdog.step_finished()

    assert killed_at(scenario) is None


def test_clients_that_time_out_first_do_not_hide_a_hanging_engine():
    async def scenario(requests, watchdog):
        for _ in range(4):
            requests.add("one")
            await asyncio.sleep(55)
            requests.clear()
            await asyncio.sleep(55)

    # The fourth client is present at 335 s; of the beats until 380 s at least sixteen saw a client.
    assert 300 < killed_at(scenario) < 400


def test_the_longest_step_has_a_full_budget_batch_and_cache():
    cost = StepCost(step=1.0, decode=0.1, cell=0.01, prompt_token=0.001)
    assert longest_step(cost, prompt_tokens=2_000, sequences=10, cells=100) == pytest.approx(1 + 1 + 1 + 2)
    assert longest_step(None, prompt_tokens=2_000, sequences=10, cells=100) == 0
