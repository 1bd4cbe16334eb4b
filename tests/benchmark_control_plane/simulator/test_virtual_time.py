"""Tests of the virtual-time event loop."""

import asyncio
import gc
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_control_plane.simulator.virtual_time import StuckLoop, run


async def _wake_times(delays: list[float]) -> list[tuple[int, float]]:
    loop = asyncio.get_running_loop()
    woken: list[tuple[int, float]] = []

    async def sleeper(number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((number, loop.time()))

    await asyncio.gather(*(sleeper(n, d) for n, d in enumerate(delays)))
    return woken


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_timers_fire_in_order_and_on_time(delays):
    woken = run(_wake_times(delays))
    assert [delays[n] for n, _ in woken] == sorted(delays)
    assert all(at == pytest.approx(delays[n], abs=1e-8) for n, at in woken)


def test_runs_are_deterministic():
    delays = [0.1 * (n % 7) for n in range(50)]
    assert run(_wake_times(delays)) == run(_wake_times(delays))


def test_a_year_takes_no_time():
    async def main() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(365 * 86_400)


def test_timeout_ends_an_endless_wait():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(7)


def test_clock_does_not_advance_while_callbacks_are_ready():
    async def main() -> float:
        asyncio.get_running_loop().call_later(1, lambda: None)
        for _ in range(1_000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def test_stuck_loop_names_the_waiting_tasks():
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(wait_for_godot(), name="vladimir")

    with pytest.raises(StuckLoop, match=r"at 3 s .* 2 tasks wait: .*vladimir at .*test_virtual_time.py"):
        run(main())


def test_pending_tasks_are_cancelled_at_the_end():
    left: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cancelled")

    async def main() -> str:
        task = asyncio.create_task(forever())
        await asyncio.sleep(1)
        return task.get_name()

    run(main())
    assert left == ["cancelled"]


def test_run_in_executor_raises():
    async def main() -> None:
        await asyncio.to_thread(time.time)

    with pytest.raises(RuntimeError, match="threads take real time"):
        run(main())


def test_exceptions_propagate():
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_files_are_polled_before_the_clock_advances():
    async def main() -> float:
        loop, read_at = asyncio.get_running_loop(), []
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"x")
            loop.add_reader(ours, lambda: read_at.append((ours.recv(1), loop.time())))
            await asyncio.sleep(1)
            loop.remove_reader(ours)
        assert read_at == [(b"x", 0.0)]
        return loop.time()

    assert run(main()) == 1.0


def test_modules_are_left_out_of_garbage_collection_during_a_run():
    async def frozen() -> int:
        return gc.get_freeze_count()

    assert run(frozen()) > 0
    assert gc.get_freeze_count() == 0
