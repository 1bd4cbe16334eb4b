import asyncio

import pytest

from benchmark_control_plane.simulator.virtual_time import run
from controlplane.service.runtime.timers import LoopTimer, SchedulerTimer


async def test_work_is_repeated_until_stopped():
    done, runs, ticks = asyncio.Event(), 0, SchedulerTimer()

    async def work(step: int):
        nonlocal runs
        runs += step
        if runs == 3:
            done.set()

    # A lambda is no coroutine function, although it returns a coroutine.
    ticks.schedule_periodic(0.002, lambda: work(1))
    await asyncio.wait_for(done.wait(), 10)
    ticks.stop()
    ticks.stop()
    seen = runs
    await asyncio.sleep(0)
    assert runs == seen


async def test_a_run_due_before_the_stop_does_nothing_after_it():
    runs, ticks = 0, SchedulerTimer()

    async def work():
        nonlocal runs
        runs += 1

    ticks.schedule_periodic(3_600, work)
    (job,) = ticks._scheduler.get_jobs()
    await job.func()
    ticks.stop()
    await job.func()
    assert runs == 1


def test_a_loop_timer_runs_at_its_period_until_stopped():
    async def main() -> list[float]:
        loop, timer, times = asyncio.get_running_loop(), LoopTimer(), []
        timer.schedule_periodic(0.01, lambda: times.append(loop.time()))
        await asyncio.sleep(0.025)
        timer.stop()
        await asyncio.sleep(0.1)
        return times

    assert run(main()) == pytest.approx([0.01, 0.02])
