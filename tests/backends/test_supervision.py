"""The watchdog counts only time in which the supervised process was able to respond."""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.supervision import SchedulingDelay, Watchdog, is_traced, run_queue_seconds
from benchmark_control_plane.simulator.virtual_time import run

on_linux = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux schedstat")


def expired_at(scenario, *, excluded=lambda: 0.0) -> float | None:
    """Time at which a watchdog of 16 s (16 ticks of 1 s) expires; None if not within 1,000 s."""

    async def main():
        loop, expired = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        watchdog = Watchdog(16.0, lambda: expired.set_result(loop.time()), excluded)
        playing = asyncio.create_task(scenario(watchdog))
        await asyncio.wait({expired, playing}, timeout=1_000, return_when=asyncio.FIRST_EXCEPTION)
        await playing
        watchdog.stop()
        return expired.result() if expired.done() else None

    return run(main())


async def no_response(watchdog):
    watchdog.arm("an answer")


def test_a_missing_response_expires_after_the_deadline():
    assert expired_at(no_response) == pytest.approx(17)


def test_responses_within_the_deadline_do_not_expire():
    async def scenario(watchdog):
        for number in range(100):
            watchdog.arm(number)
            await asyncio.sleep(15)
            watchdog.disarm(number)

    assert expired_at(scenario) is None


def test_rearming_and_other_keys_do_not_extend_a_deadline():
    async def scenario(watchdog):
        watchdog.arm("stuck")
        for number in range(100):
            watchdog.arm(number)
            await asyncio.sleep(1)
            watchdog.arm("stuck")
            watchdog.disarm(number)

    assert expired_at(scenario) == pytest.approx(17)


def test_a_longer_timeout_extends_the_deadline_and_a_shorter_one_does_not():
    async def scenario(watchdog):
        watchdog.arm("long", 60)
        watchdog.arm("short", 1)
        await asyncio.sleep(15)
        watchdog.disarm("short")

    assert expired_at(scenario) == pytest.approx(61)


def test_time_without_a_pending_deadline_does_not_count():
    async def scenario(watchdog):
        watchdog.arm("first")
        await asyncio.sleep(15)
        watchdog.disarm("first")
        await asyncio.sleep(100)
        watchdog.arm("second")

    assert expired_at(scenario) == pytest.approx(132)


def test_a_pause_of_the_process_group_counts_as_one_tick():
    async def scenario(watchdog):
        watchdog.arm("an answer")
        await asyncio.sleep(5.5)
        loop = asyncio.get_running_loop()
        loop._set_time(loop.time() + 500)

    # At 5.5 s five ticks are over; the sixth is late, and the others follow.
    assert expired_at(scenario) == pytest.approx(505.5 + 11)


def test_a_response_received_during_a_pause_prevents_expiry():
    async def scenario(watchdog):
        loop = asyncio.get_running_loop()
        watchdog.arm("an answer")
        await asyncio.sleep(15.5)
        response = asyncio.create_task(asyncio.sleep(0))
        response.add_done_callback(lambda _: watchdog.disarm("an answer"))
        loop._set_time(loop.time() + 500)

    assert expired_at(scenario) is None


def test_excluded_time_does_not_count():
    assert expired_at(no_response, excluded=lambda: 0.5) == pytest.approx(33)
    assert expired_at(no_response, excluded=lambda: float("inf")) is None


@contextmanager
def running(program: str):
    """Process id of a process that runs `program`, after it has printed a line."""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


@on_linux
def test_scheduling_delay_measures_waiting_for_a_core():
    core = min(os.sched_getaffinity(0))
    spinning = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with running(spinning), running(spinning) as pid:
        delay, before = SchedulingDelay(pid), run_queue_seconds(pid)
        while run_queue_seconds(pid) == before:
            pass
        assert 0 < delay() < 60
    assert run_queue_seconds(pid) == 0


@on_linux
def test_scheduling_delay_of_a_traced_process_is_infinite():
    with running("import sys; print(flush=True); sys.stdin.read()") as pid:
        assert not is_traced(pid)
        assert SchedulingDelay(pid)() < 60
    traced = "import ctypes, sys; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); sys.stdin.read()"
    with running(traced) as pid:
        assert is_traced(pid)
        assert SchedulingDelay(pid)() == float("inf")
    assert not is_traced(pid)
