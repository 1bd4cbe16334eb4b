"""Timers for repeated work on the event loop, and the clocks of live and simulated servers.

Instants of both clocks are times of the event loop too, so timers can be set from them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Protocol

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from controlplane.core.clock import Instant, seconds

# It warns of each run that is still busy when the next one is due.
logging.getLogger("apscheduler").setLevel(logging.ERROR)


class PeriodicTimer(Protocol):
    """Runs asynchronous work at a fixed period, one run at a time."""

    def schedule_periodic(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` every `seconds`, first after one period."""

    def stop(self) -> None:
        """Cancels the runs in progress; no run begins after it."""


_CLOCK_CHECK_SECONDS = 1.0
# Slewing by NTP stays below 1 ms a second.
_CLOCK_STEP_SECONDS = 0.2


class SkippingTrigger(IntervalTrigger):  # type: ignore[misc]
    """An interval that skips runs which the wall clock has passed.

    APScheduler's own computes each of them: after a step of one day it blocked the loop for two seconds.
    """

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """The next time after `now`, on the grid of the previous one unless a time of it was missed."""
        due: datetime = super().get_next_fire_time(previous_fire_time, now)
        return due if previous_fire_time is None or due > now else now + self.interval


class SchedulerTimer:
    """Runs asynchronous work by APScheduler at a fixed interval.

    A run that takes longer than its period delays the next one; missed runs are skipped. APScheduler compares
    times of the wall clock, so that without `_follow_clock` nothing would run for as long as it is set back.
    """

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler()
        self._clock_check = LoopTimer()
        self._wall_offset = 0.0

    def schedule_periodic(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Adds an interval job."""
        scheduler = self._scheduler

        async def run() -> None:
            # A run that was due before `stop` may begin after it.
            if scheduler is not self._scheduler:
                return
            # Only `stop` cancels a run, and APScheduler would log the cancellation as an error.
            with suppress(asyncio.CancelledError):
                await work()

        # APScheduler runs a callable that is not a coroutine function in a thread, hence `run`.
        trigger = SkippingTrigger(seconds=seconds)
        scheduler.add_job(run, trigger, max_instances=1, coalesce=True, misfire_grace_time=None)
        if not scheduler.running:
            scheduler.start()
            self._wall_offset = _wall_offset()
            self._clock_check.schedule_periodic(_CLOCK_CHECK_SECONDS, self._follow_clock)

    def stop(self) -> None:
        """Cancels all jobs; more may be added afterwards."""
        # `shutdown` takes effect in the next iteration of the loop; until then `running` stays true, and a
        # second shutdown would fail.
        scheduler, self._scheduler = self._scheduler, AsyncIOScheduler()
        self._clock_check.stop()
        if scheduler.running:
            scheduler.shutdown(wait=False)

    def _follow_clock(self) -> None:
        """Makes all jobs due if the wall clock was set."""
        before, self._wall_offset = self._wall_offset, _wall_offset()
        if abs(self._wall_offset - before) > _CLOCK_STEP_SECONDS:
            now = datetime.now(self._scheduler.timezone)
            for job in self._scheduler.get_jobs():
                job.modify(next_run_time=now)


def _wall_offset() -> float:
    return time.time() - time.monotonic()


class LoopTimer:
    """Runs one function at a fixed period by the event loop's own timer.

    For periods of a few milliseconds. On uvloop an empty run every 10 ms took 1.1 % of a core; as an
    APScheduler job it took 3.9 %. Runs that a busy loop has missed are skipped.
    """

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def schedule_periodic(self, seconds: float, work: Callable[[], None]) -> None:
        """`work` must not raise: no run follows one that did."""
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds

        def run() -> None:
            nonlocal due
            work()
            due = max(due + seconds, loop.time())
            self._handle = loop.call_at(due, run)

        self._handle = loop.call_at(due, run)

    def stop(self) -> None:
        """Cancels the next run."""
        if self._handle is not None:
            self._handle.cancel()


class MonotonicClock:
    """The host's monotonic clock, for live servers; uvloop's own time has a resolution of 1 ms."""

    def now(self) -> Instant:
        """Nanoseconds since an arbitrary start."""
        return Instant(time.monotonic_ns())


class LoopClock:
    """The time of the event loop in which the clock is first read; it may be virtual."""

    def __init__(self) -> None:
        # Virtual time stands still while all tokens of a step are stamped.
        self._read, self._now = -1.0, Instant(-1)

    @cached_property
    def _loop_time(self) -> Callable[[], float]:
        # Looking up the running loop makes a system call, and every token is stamped.
        return asyncio.get_running_loop().time

    def now(self) -> Instant:
        """The loop's time in nanoseconds."""
        if (read := self._loop_time()) != self._read:
            self._read, self._now = read, Instant(seconds(read))
        return self._now
