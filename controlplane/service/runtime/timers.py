"""Timers for repeated work on the event loop, and the clocks of live and simulated servers.

Instants of both clocks are times of the event loop too, so timers can be set from them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property
from typing import Protocol

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from controlplane.core.clock import Instant, seconds

# It warns of each run that is still busy when the next one is due.
logging.getLogger("apscheduler").setLevel(logging.ERROR)


class PeriodicTimer(Protocol):
    """Runs asynchronous work at a fixed period, one run at a time."""

    def schedule_periodic(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` every `seconds`, first after one period."""

    def stop(self) -> None:
        """Cancels the runs in progress; no run begins after it."""


class SchedulerTimer:
    """Runs asynchronous work by APScheduler's interval trigger.

    A run that takes longer than its period delays the next one; missed runs are skipped.
    """

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler()

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
        scheduler.add_job(
            run, "interval", seconds=seconds, max_instances=1, coalesce=True, misfire_grace_time=None
        )
        if not scheduler.running:
            scheduler.start()

    def stop(self) -> None:
        """Cancels all jobs; more may be added afterwards."""
        # `shutdown` takes effect in the next iteration of the loop; until then `running` stays true, and a
        # second shutdown would fail.
        scheduler, self._scheduler = self._scheduler, AsyncIOScheduler()
        if scheduler.running:
            scheduler.shutdown(wait=False)


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

    @cached_property
    def _loop_time(self) -> Callable[[], float]:
        # Looking up the running loop makes a system call, and every token is stamped.
        return asyncio.get_running_loop().time

    def now(self) -> Instant:
        """The loop's time in nanoseconds."""
        return Instant(seconds(self._loop_time()))
