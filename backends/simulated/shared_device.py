"""Simulated device that several backends share, step by step on the event loop's clock.

A step is composed from all kinds of work, takes the time that the batch-time model gives, and then its
results are distributed. As in a real engine, the next step is composed before any client reacts to the
previous one. On a virtual-time loop the same requests always produce the same schedule.

Engines that compute at the same time have a device each, of which one may slow the other down.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from backends.cost_models.step_time import BatchTime, StepLoad
from controlplane.core.clock import Instant, seconds
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


@dataclass(eq=False, slots=True)
class _Step:
    """The step in progress, with the kinds of work that have a part in it; times in seconds.

    At `since`, `left` of it was to come on a device that nothing slows down.
    """

    load: StepLoad
    works: list[Work]
    start: float
    duration: float
    since: float
    left: float


class SimulatedDevice:
    """Device whose time is shared by the backends attached to it; it runs while any of them is started.

    `on_step` observes every finished step. `down` is the reason why the device is down, or None.
    `loop` is the event loop in which it was started. The time of each step is multiplied by one of the
    factors in `spread`, drawn at random.
    """

    def __init__(
        self, batch_time: BatchTime, *, on_step: OnStep | None = None, spread: Sequence[float] = (1.0,)
    ) -> None:
        self._batch_time = batch_time
        self._spread, self._random = spread, Random(0)
        self._slowed: list[tuple[SimulatedDevice, float]] = []
        self._slowdown = 1.0
        self._was_busy = False
        self._on_step = on_step
        self._works: list[Work] = []
        self._users = 0
        self._step: _Step | None = None
        self._next: asyncio.Handle | None = None
        self._is_idle = False
        self._error: Exception | None = None
        self.loop: asyncio.AbstractEventLoop
        self.down: str | None = "not started"

    def attach(self, work: Work) -> None:
        """Adds a kind of work; work attached first is planned first."""
        self._works.append(work)

    def slow_down(self, other: "SimulatedDevice", factor: float) -> None:
        """Has the steps of `other` take `factor` times as long while this device computes."""
        self._slowed.append((other, factor))

    def wake(self) -> None:
        """Ends the idle wait after work has arrived."""
        if self._is_idle:
            self._is_idle = False
            if self._next is not None:
                self._next.cancel()
            self._next = self.loop.call_soon(self._advance)

    def now(self) -> Instant:
        """The time of the event loop."""
        return Instant(seconds(self.loop.time()))

    def duration(self, load: StepLoad) -> float:
        """Seconds that a step with this load takes."""
        return self._batch_time(load)

    def start(self) -> None:
        """Counts one more user and starts the device if it is stopped."""
        self._users += 1
        if self.down is not None and self._error is None:
            self.down = None
            # Looking up the running loop makes a system call, and each step needs the time repeatedly.
            self.loop = asyncio.get_running_loop()
            self._next = self.loop.call_soon(self._advance)

    async def stop(self) -> None:
        """Counts one user less; stops after the last. Raises the exception that ended a step, if one did."""
        self._users -= 1
        if self._users <= 0 and (self.down is None or self._error is not None):
            if self._next is not None:
                self._next.cancel()
            self._next = self._step = None
            self._is_idle = False
            self._announce()
            self._fail("stopped")
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def require_up(self) -> None:
        """Raises BackendDown if the device is down."""
        if self.down is not None:
            raise BackendDown(f"simulated device: {self.down}")

    def _fail(self, reason: str) -> None:
        self.down = reason
        for work in self._works:
            work.fail(reason)

    def _advance(self) -> None:
        """Ends the step in progress and begins the next one. An exception puts the device down."""
        # A chain of callbacks: a task that sleeps takes twice as long for each step.
        try:
            if self._step is not None:
                self._end(self._step)
            self._begin()
        except Exception as error:
            self._error, self._step = error, None
            self._fail(f"failed with {error!r}")
        self._announce()

    def _announce(self) -> None:
        """Slows the other devices down, or ends that, if this one has become busy or idle."""
        is_busy = self._step is not None
        if is_busy is not self._was_busy:
            self._was_busy = is_busy
            for other, factor in self._slowed:
                other._compute_at(factor if is_busy else 1.0)

    def _compute_at(self, slowdown: float) -> None:
        """Has the rest of the step in progress, and those that follow, take `slowdown` times as long."""
        if (step := self._step) is not None and self._next is not None:
            now = self.loop.time()
            step.left = max(0.0, step.left - (now - step.since) / self._slowdown)
            step.since, end = now, now + slowdown * step.left
            step.duration = end - step.start
            self._next.cancel()
            self._next = self.loop.call_at(end, self._advance)
        self._slowdown = slowdown

    def _end(self, step: _Step) -> None:
        self._step = None
        for work in step.works:
            work.complete(step.duration)
        if self._on_step is not None:
            self._on_step(step.start, step.duration, step.load)

    def _begin(self) -> None:
        """Begins a step, or waits until there is work, at the latest until a kind of work asks again."""
        load, loop = StepLoad(), self.loop
        works = [work for work in self._works if work.plan(load)]
        if not works:
            retries = [work.retry_at for work in self._works if work.retry_at is not None]
            self._is_idle = True
            self._next = loop.call_at(min(retries), self._ask_again) if retries else None
            return
        duration = self._batch_time(load)
        if duration < 0:
            raise ValueError(
                f"the batch-time model gives {duration} s for {load}; a duration must be at least 0"
            )
        if len(self._spread) > 1:
            duration *= self._random.choice(self._spread)
        start, left = loop.time(), duration
        duration *= self._slowdown
        self._step = _Step(load, works, start, duration, start, left)
        self._next = (
            loop.call_at(start + duration, self._advance) if duration else loop.call_soon(self._advance)
        )

    def _ask_again(self) -> None:
        self._is_idle = False
        self._advance()
