"""How do two kinds of work share one device that is not there? Step by step, on the loop's clock.

Rule: one task composes a step from all kinds of work, lets it last as long as the batch-time model says, and
hands out the results. As with a real engine, the next step is composed before anybody can react to the
last one. Meant for a virtual-time loop, where the same requests always take the same course.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from backends.cost_models.step_time import BatchTime, StepLoad
from controlplane.core.errors import BackendDown

OnStep = Callable[[float, float, StepLoad], None]
"""(start, duration, load) of every step, when it is over."""


class Work(Protocol):
    """One kind of work on the device."""

    def plan(self, load: StepLoad) -> bool:
        """Adds its part of the next step to `load`; False if it has none."""
        ...

    def complete(self, duration: float) -> None: ...

    def fail(self, reason: str) -> None:
        """The device is gone; whatever was under way fails with BackendDown."""


class SimulatedDevice:
    """Backends made on it share its time. It runs while any of them is started."""

    def __init__(self, batch_time: BatchTime, *, on_step: OnStep | None = None) -> None:
        self._batch_time = batch_time
        self._on_step = on_step
        self._works: list[Work] = []
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self.down: str | None = "not started"

    def attach(self, work: Work) -> None:
        self._works.append(work)

    def wake(self) -> None:
        self._has_work.set()

    def duration(self, load: StepLoad) -> float:
        return self._batch_time(load)

    def start(self) -> None:
        self._users += 1
        if self._task is None:
            self.down = None
            self._task = asyncio.create_task(self._run(), name="simulated device")

    async def stop(self) -> None:
        """Raises what a step died of, if one did."""
        self._users -= 1
        if self._users <= 0 and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
            self._fail("stopped")
            if not task.cancelled():
                task.result()

    def require_up(self) -> None:
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
            self._fail(f"died of {error!r}")
            raise

    async def _step(self) -> None:
        load = StepLoad()
        busy = [work for work in self._works if work.plan(load)]
        if not busy:
            self._has_work.clear()
            await self._has_work.wait()
            return
        duration = self._batch_time(load)
        if duration < 0:
            raise ValueError(f"the batch-time model gives {duration} s for {load}; no step takes less than 0")
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(duration)
        for work in busy:
            work.complete(duration)
        if self._on_step is not None:
            self._on_step(start, duration, load)
