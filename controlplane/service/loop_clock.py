"""The server's clock: the event loop's own, so that timers and stamps agree, also on virtual time."""

import asyncio

from controlplane.core.clock import Instant, seconds


class LoopClock:
    def now(self) -> Instant:
        return Instant(seconds(asyncio.get_running_loop().time()))
