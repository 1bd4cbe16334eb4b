"""Whose time is it? Two clocks on one base: instants are loop times too, so timers can be set from them."""

import asyncio
import time

from controlplane.core.clock import Instant, seconds


class MonotonicClock:
    """For live servers. uvloop's own time moves in whole milliseconds, a token takes as long."""

    def now(self) -> Instant:
        return Instant(time.monotonic_ns())


class LoopClock:
    """For event loops on virtual time."""

    def now(self) -> Instant:
        return Instant(seconds(asyncio.get_running_loop().time()))
