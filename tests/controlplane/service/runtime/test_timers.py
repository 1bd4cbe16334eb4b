import asyncio

from controlplane.service.runtime.timers import SchedulerTimer


async def test_work_is_repeated_until_stopped():
    done, runs, ticks = asyncio.Event(), 0, SchedulerTimer()

    async def work(step: int):
        nonlocal runs
        runs += step
        if runs == 3:
            done.set()

    # A lambda is no coroutine function, although it returns a coroutine.
    ticks.every(0.002, lambda: work(1))
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

    ticks.every(3_600, work)
    (job,) = ticks._scheduler.get_jobs()
    await job.func()
    ticks.stop()
    await job.func()
    assert runs == 1
