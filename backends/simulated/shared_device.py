"""Simulated device that several backends share, step by step on the event loop's clock.

One task composes a step from all kinds of work, sleeps for the time that the batch-time model gives, and
distributes the results. As in a real engine, the next step is composed before any client reacts to the
previous one. On a virtual-time loop the same requests always produce the same schedule.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from backends.cost_models.step_time import BatchTime, StepLoad
from controlplane.core.errors import BackendDown

OnStep = Callable[[float, float, StepLoad], None]
"""(start, duration, load) of a finished step, in seconds."""


class Work(Protocol):
    """One kind of work on the device.

    `retry_at` is when work without a part in the last step asks again, in seconds; None if only `wake` can
    change that.
    """

    retry_at: float | None

    def plan(self, load: StepLoad) -> bool:
        """Adds its part of the next step to `load`; returns False if it has none."""
        ...

    def complete(self, duration: float) -> None:
        """Delivers the results of the planned step, which took `duration` seconds."""
        ...

    def fail(self, reason: str) -> None:
        """Fails all requests with BackendDown, because the device is down."""


class SimulatedDevice:
    """Device whose time is shared by the backends attached to it; it runs while any of them is started.

    `on_step` observes every finished step. `down` is the reason why the device is down, or None.
    `paced_until` is the time in seconds to which the LLM's step is delayed in favour of other work, or None.
    """

    def __init__(self, batch_time: BatchTime, *, on_step: OnStep | None = None) -> None:
        self._batch_time = batch_time
        self._on_step = on_step
        self._works: list[Work] = []
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self.down: str | None = "not started"
        self.paced_until: float | None = None

    def attach(self, work: Work) -> None:
        """Adds a kind of work; work attached first is planned first."""
        self._works.append(work)

    def wake(self) -> None:
        """Ends the idle wait after work has arrived."""
        self._has_work.set()

    def duration(self, load: StepLoad) -> float:
        """Seconds that a step with this load takes."""
        return self._batch_time(load)

    def start(self) -> None:
        """Counts one more user and starts the device if it is stopped."""
        self._users += 1
        if self._task is None:
            self.down = None
            self._task = asyncio.create_task(self._run(), name="simulated device")

    async def stop(self) -> None:
        """Counts one user less; stops after the last. Raises the exception that ended a step, if one did."""
        self._users -= 1
        if self._users <= 0 and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
            self._fail("stopped")
            if not task.cancelled():
                task.result()

    def require_up(self) -> None:
        """Raises BackendDown if the device is down."""
        if self.down is not None:
            raise BackendDown(f"simulated device: {self.down}")

    def _fail(self, reason: str) -> None:
        self.down = reason
        for work in self._works:
            work.fail(reason)

    async def _run(self) -> None:
        try:
            while True:
                await self._step()
        except Exception as error:
            self._fail(f"failed with {error!r}")
            raise

    async def _step(self) -> None:
        load = StepLoad()
        busy = [work for work in self._works if work.plan(load)]
        if not busy:
            self._has_work.clear()
            retries = [work.retry_at for work in self._works if work.retry_at is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(retries, default=None)):
                    await self._has_work.wait()
            return
        duration = self._batch_time(load)
        if duration < 0:
            raise ValueError(
                f"the batch-time model gives {duration} s for {load}; a duration must be at least 0"
            )
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(duration)
        for work in busy:
            work.complete(duration)
        if self._on_step is not None:
            self._on_step(start, duration, load)
