"""Restarts an LLM engine that died: exponential backoff, a bounded number of attempts in a time window.

If the attempts do not suffice, or none is allowed, the engine is given up and the server is to exit, so that
the supervisor of its process acts, as an Erlang supervisor escalates.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controlplane.config.models_section import RestartSection
from controlplane.core.clock import Duration, seconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.errors import BackendDown
from controlplane.core.ports import Generator

log = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
# A restart may take this many times as long as the longest start so far.
_STALL_FACTOR = 10.0
_MIN_START_LIMIT_SECONDS = 60.0
_MIN_RETRY_SECONDS = 1.0

OnDown = Callable[[BackendDown, Reject], None]
"""Ends the requests of the dead engine: dispatched ones with the error, the others with the rejection."""


class EngineSupervisor:
    """Supervises one engine; `policy` None restarts it never.

    `given_up` is set once the engine is dead and is not restarted.
    """

    def __init__(self, generator: Generator, policy: RestartSection | None) -> None:
        self.given_up = asyncio.Event()
        self.restarts = 0
        """Attempts so far, failed ones included."""
        self.generator = generator
        self._policy = policy
        generator.on_down = self._engine_died
        self._attempts: list[float] = []
        self.start_seconds = 0.0
        """How long the last start took."""
        self._longest_start = 0.0
        self._down: str | None = None
        self._up_at: float | None = None
        self._died = asyncio.Event()
        self._on_down: OnDown | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        """Name of the engine's model."""
        return self.generator.model

    async def start(self) -> None:
        """Starts the engine and measures how long that takes. Raises what its `start` raises."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.generator.start()
        self.start_seconds = loop.time() - began
        self._longest_start = max(self._longest_start, self.start_seconds)

    def supervise(self, on_down: OnDown, restore: Callable[[], Awaitable[None]]) -> None:
        """Begins to restart the engine after each death.

        `on_down` is called at each death, before the engine's streams end. `restore` prepares a new engine
        for requests; if it raises, the attempt has failed.
        """
        self._on_down = on_down
        self._task = asyncio.create_task(self._supervise(restore), name=f"supervisor-{self.model}")
        self._task.add_done_callback(self._supervision_ended)

    async def stop(self) -> None:
        """Ends supervision, and a restart in progress; the engine is stopped by its owner."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def error(self) -> BackendDown:
        """The error of a request, or of readiness, for which the engine is down."""
        wait = self._seconds_until_up()
        if wait is None:
            return BackendDown(f"{self._down}; it is not restarted", is_permanent=True)
        return BackendDown(f"{self._down}; it is restarted", retry_after=wait)

    def rejection(self) -> Reject | None:
        """The rejection of a new request; None while the engine is up."""
        if self._down is None:
            return None
        return Reject(Reason.ENGINE_DOWN, self._retry_after())

    def require_up(self) -> None:
        """Raises BackendDown from the engine's death until it serves again."""
        if self._down is not None:
            raise self.error()

    def to_json(self) -> dict[str, object]:
        """State for the operator."""
        return {"down": self._down, "restarts": self.restarts, "start_seconds": self.start_seconds}

    def _engine_died(self, reason: str) -> None:
        self._died.set()
        if self._down is not None:
            # It died during a restart, which fails by this.
            return
        self._up_at = self._expected_up()
        self._down = f"the engine of {self.model} is down: {reason}"
        log.error("%s", self.error())
        if self._on_down is not None:
            self._on_down(self.error(), Reject(Reason.ENGINE_DOWN, self._retry_after()))

    async def _supervise(self, restore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._died.wait()
            await self._stop_engine()
            while (delay := self._next_delay()) is not None:
                self._up_at = self._expected_up()
                await asyncio.sleep(delay)
                if await self._restarted(restore):
                    break
            else:
                self._up_at = None
                log.critical("%s, after %d restarts in the window", self.error(), len(self._recent()))
                self.given_up.set()
                return

    async def _restarted(self, restore: Callable[[], Awaitable[None]]) -> bool:
        """Makes one attempt and returns whether the engine serves again."""
        self._attempts = [*self._recent(), asyncio.get_running_loop().time()]
        self.restarts += 1
        number, model = len(self._attempts), self.model
        self._died.clear()
        try:
            async with asyncio.timeout(max(_MIN_START_LIMIT_SECONDS, _STALL_FACTOR * self._longest_start)):
                await self.start()
            await restore()
            if self._died.is_set():
                raise BackendDown("the engine died while it was set up")
        except Exception as error:
            # Whatever is wrong with this attempt, the next one may succeed, and their number is bounded.
            log.error("restart %d of %s failed: %s", number, model, error or repr(error))
            await self._stop_engine()
            return False
        self._down = None
        log.warning("restart %d of %s succeeded in %.1f s", number, model, self.start_seconds)
        return True

    async def _stop_engine(self) -> None:
        try:
            await self.generator.stop()
        except Exception:
            log.exception("the dead engine of %s failed to stop", self.model)

    def _retry_after(self) -> Duration | None:
        wait = self._seconds_until_up()
        return None if wait is None else seconds(wait)

    def _recent(self) -> list[float]:
        """Times of the attempts within the window."""
        if self._policy is None:
            return []
        since = asyncio.get_running_loop().time() - self._policy.window_ms / 1_000
        return [at for at in self._attempts if at > since]

    def _next_delay(self) -> float | None:
        """Seconds to wait before another attempt; None if none is left."""
        done = len(self._recent())
        if self._policy is None or done >= self._policy.attempts:
            return None
        # The exponent is bounded, since a float overflows at 2**1024.
        backoff = self._policy.backoff_ms / 1_000 * 2.0 ** min(done - 1, 64)
        return min(_MAX_BACKOFF_SECONDS, backoff) if done else 0.0

    def _expected_up(self) -> float | None:
        """Predicted time at which the engine serves after a failure now; None if it is not restarted."""
        delay = self._next_delay()
        return None if delay is None else asyncio.get_running_loop().time() + delay + self.start_seconds

    def _seconds_until_up(self) -> float | None:
        """Predicted time until the engine serves again, at least a second; None if it is not restarted."""
        now = asyncio.get_running_loop().time()
        return None if self._up_at is None else max(_MIN_RETRY_SECONDS, self._up_at - now)

    def _supervision_ended(self, task: "asyncio.Task[None]") -> None:
        """Gives the engine up if the supervising task raised, which only a defect causes."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s is not supervised any more", self.model, exc_info=error)
            self._down, self._up_at = self._down or f"{self.model} is not supervised", None
            self.given_up.set()
