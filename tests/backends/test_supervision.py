"""Only time in which the other could have answered counts against it."""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.supervision import SchedulingDelay, Watchdog, is_traced, run_queue_seconds
from benchmark_control_plane.simulator.virtual_time import run

on_linux = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells")


def lost_at(scenario, *, spared=lambda: 0.0) -> float | None:
    """When the patience of 16 s, and so of 16 beats, was lost within 1,000 s of the scenario."""

    async def main():
        loop, lost = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        patience = Watchdog(16.0, lambda: lost.set_result(loop.time()), spared)
        playing = asyncio.create_task(scenario(patience))
        await asyncio.wait({lost, playing}, timeout=1_000, return_when=asyncio.FIRST_EXCEPTION)
        await playing
        patience.end()
        return lost.result() if lost.done() else None

    return run(main())


async def nothing_comes(patience):
    patience.arm("an answer")


def test_what_is_left_unanswered_is_lost_when_its_time_is_up():
    assert lost_at(nothing_comes) == pytest.approx(17)


def test_what_is_answered_in_time_is_not():
    async def scenario(patience):
        for number in range(100):
            patience.arm(number)
            await asyncio.sleep(15)
            patience.disarm(number)

    assert lost_at(scenario) is None


def test_one_thing_left_is_not_forgotten_over_others_that_come():
    async def scenario(patience):
        patience.arm("stuck")
        for number in range(100):
            patience.arm(number)
            await asyncio.sleep(1)
            patience.arm("stuck")
            patience.disarm(number)

    assert lost_at(scenario) == pytest.approx(17)


def test_more_time_is_granted_to_what_takes_longer_and_no_less_than_all_have():
    async def scenario(patience):
        patience.arm("long", 60)
        patience.arm("short", 1)
        await asyncio.sleep(15)
        patience.disarm("short")

    assert lost_at(scenario) == pytest.approx(61)


def test_time_rested_is_forgotten():
    async def scenario(patience):
        patience.arm("first")
        await asyncio.sleep(15)
        patience.disarm("first")
        await asyncio.sleep(100)
        patience.arm("second")

    assert lost_at(scenario) == pytest.approx(132)


def test_a_pause_of_us_all_is_one_beat_however_long():
    async def scenario(patience):
        patience.arm("an answer")
        await asyncio.sleep(5.5)
        loop = asyncio.get_running_loop()
        loop._stand_at(loop.time() + 500)

    # At 5.5 s five beats are over; the sixth is late, and the others follow.
    assert lost_at(scenario) == pytest.approx(505.5 + 11)


def test_what_came_during_a_pause_is_taken_in_before_anybody_is_lost():
    async def scenario(patience):
        loop = asyncio.get_running_loop()
        patience.arm("an answer")
        await asyncio.sleep(15.5)
        came = asyncio.create_task(asyncio.sleep(0))
        came.add_done_callback(lambda _: patience.disarm("an answer"))
        loop._stand_at(loop.time() + 500)

    assert lost_at(scenario) is None


def test_time_that_is_spared_does_not_count():
    assert lost_at(nothing_comes, spared=lambda: 0.5) == pytest.approx(33)
    assert lost_at(nothing_comes, spared=lambda: float("inf")) is None


@contextmanager
def running(program: str):
    """A process that runs the program; it has printed a line before."""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


@on_linux
def test_a_process_that_waits_for_its_core_is_hindered():
    core = min(os.sched_getaffinity(0))
    spinning = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with running(spinning), running(spinning) as pid:
        hindered, before = SchedulingDelay(pid), run_queue_seconds(pid)
        while run_queue_seconds(pid) == before:
            pass
        assert 0 < hindered() < 60
    assert run_queue_seconds(pid) == 0


@on_linux
def test_a_process_under_a_debugger_has_all_the_time():
    with running("import sys; print(flush=True); sys.stdin.read()") as pid:
        assert not is_traced(pid)
        assert SchedulingDelay(pid)() < 60
    traced = "import ctypes, sys; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); sys.stdin.read()"
    with running(traced) as pid:
        assert is_traced(pid)
        assert SchedulingDelay(pid)() == float("inf")
    assert not is_traced(pid)
