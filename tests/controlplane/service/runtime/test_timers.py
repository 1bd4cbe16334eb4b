import asyncio
import time
from datetime import UTC, datetime, timedelta
from unittest.mock import patch

import pytest

from benchmark_control_plane.simulator.virtual_time import run
from controlplane.service.runtime.timers import LoopTimer, SchedulerTimer, SkippingTrigger


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


def test_runs_that_the_wall_clock_has_passed_are_skipped_at_once():
    trigger, now = SkippingTrigger(seconds=0.05), datetime(2026, 1, 2, tzinfo=UTC)
    period = timedelta(seconds=0.05)
    assert trigger.get_next_fire_time(now - timedelta(days=1), now) == now + period
    assert trigger.get_next_fire_time(now - period / 2, now) == now + period / 2


@pytest.mark.parametrize("days", [1, -1])
async def test_work_goes_on_when_the_wall_clock_is_set(days):
    """Set ahead, the 43 million runs of the day must not be computed; set back, nobody waits for a day."""
    again, runs, ticks, step = asyncio.Event(), 0, SchedulerTimer(), 0.0
    real = time.time

    class SetClock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(real() + step, tz)

    async def work():
        nonlocal runs, step
        runs += 1
        if runs == 3:
            step = days * 86_400.0
        if runs == 6:
            again.set()

    with (
        patch("apscheduler.schedulers.base.datetime", SetClock),
        patch("controlplane.service.runtime.timers.datetime", SetClock),
        patch("controlplane.service.runtime.timers.time.time", lambda: real() + step),
    ):
        ticks.schedule_periodic(0.002, work)
        await asyncio.wait_for(again.wait(), 10)
        ticks.stop()
    assert runs >= 6


def test_a_loop_timer_runs_at_its_period_until_stopped():
    async def main() -> list[float]:
        loop, timer, times = asyncio.get_running_loop(), LoopTimer(), []
        timer.schedule_periodic(0.01, lambda: times.append(loop.time()))
        await asyncio.sleep(0.025)
        timer.stop()
        await asyncio.sleep(0.1)
        return times

    assert run(main()) == pytest.approx([0.01, 0.02])
