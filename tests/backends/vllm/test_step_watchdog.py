"""The watchdog kills an engine that has requests but takes no step, with all its workers."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

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


def test_an_engine_without_requests_that_answers_no_call_is_killed():
    async def scenario(requests, watchdog):
        with watchdog.call():
            await asyncio.sleep(1_000)

    assert killed_at(scenario) in (170, 180)


def test_answers_count_as_steps():
    async def scenario(requests, watchdog):
        for _ in range(6):
            with watchdog.call():
                await asyncio.sleep(150)

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


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_that_do_not_follow_their_engine_are_killed_with_it():
    """Such a worker hangs in a kernel of the device and would keep its memory there."""
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    program = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {worker!r}]).pid); input()"
    )

    async def main(engine):
        killed = asyncio.get_running_loop().create_future()
        watchdog = StepWatchdog(
            [engine],
            stall_seconds=160,
            longest_seconds=0,
            is_idle=lambda: False,
            on_killed=lambda: killed.set_result(None),
        )
        await killed
        watchdog.stop()

    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        worker_pid = int(engine.stdout.readline())
        try:
            assert is_running(worker_pid)
            run(main(engine))
            end = time.monotonic() + 10
            while is_running(worker_pid) and time.monotonic() < end:
                time.sleep(0.01)
            assert not is_running(worker_pid)
        finally:
            engine.kill()
            if is_running(worker_pid):
                os.kill(worker_pid, 9)


def test_the_longest_step_has_a_full_budget_batch_and_cache():
    cost = StepCost(step=1.0, decode=0.1, cell=0.01, prompt_token=0.001)
    assert longest_step(cost, prompt_tokens=2_000, sequences=10, cells=100) == pytest.approx(1 + 1 + 1 + 2)
    assert longest_step(None, prompt_tokens=2_000, sequences=10, cells=100) == 0
