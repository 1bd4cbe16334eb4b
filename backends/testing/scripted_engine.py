"""Life cycle, stepping and records that both scripted engines share."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.clock import Instant
from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.core.generation import ChatPrompt, Handoff, Sampling
from controlplane.core.request import Request


@dataclass(frozen=True, slots=True)
class Script:
    """Course of one request.

    `tokens` is the output length (None: `max_tokens`). `words` are the texts of its tokens, repeated as
    needed; `reasoning_words` precede them as reasoning, one token each. The request, or the whole engine,
    fails after `request_fails_after` or `engine_fails_after` tokens. `refusal` is the message of a Refused
    error.
    """

    tokens: int | None = None
    words: tuple[str, ...] = ("word ",)
    reasoning_words: tuple[str, ...] = ()
    request_fails_after: int | None = None
    engine_fails_after: int | None = None
    refusal: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    cached_tokens: int = 0


DEFAULT_SCRIPT = Script()


@dataclass(eq=False, slots=True)
class ScriptedRun:
    """One request as the engine saw it.

    `end` is "finished", "aborted", "preempted", "failed" or "died"; None while it runs.
    """

    request: Request
    script: Script
    sampling: Sampling | None = None
    prompt: tuple[int, ...] = ()
    chat: ChatPrompt | None = None
    handoff: Handoff | None = None
    inputs: tuple[tuple[int, ...], ...] = ()
    deadline: Instant | None = None
    done: int = 0
    allowed: int = 0
    is_preempted: bool = False
    death: str | None = None
    end: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """State and stepping common to the scripted generator and embedder."""

    def __init__(self, *, model: str, max_running: int, is_stepped: bool, default: Script) -> None:
        self.model = model
        self.max_running = max_running
        self.default = default
        self.upcoming: deque[Script] = deque()
        self.runs: list[ScriptedRun] = []
        self.stall_count = 0
        self._is_stepped = is_stepped
        self._down: str | None = "not started"
        self.on_down: Callable[[str], None] | None = None
        self._slots = asyncio.Semaphore(max_running)
        self._arrived = asyncio.Condition()
        self.on_start: Callable[[], Awaitable[None]] | None = None

    @property
    def down(self) -> str | None:
        """Why the engine does nothing; None while it is up."""
        return self._down

    async def start(self) -> None:
        """Starts or restarts the engine; the test's `on_start` runs first and may never return."""
        if self.on_start is not None:
            await self.on_start()
        self._down = None

    async def stop(self) -> None:
        """Stops the engine and fails live runs."""
        self._fail_runs("stopped")

    async def check(self) -> None:
        """Raises BackendDown if the engine is down."""
        if self._down is not None:
            raise BackendDown(f"scripted engine {self.model!r}: {self._down}")

    def die(self, reason: str = "died") -> None:
        """Fails live runs, and all calls until `start`, with BackendDown."""
        self._fail_runs(reason)
        if self.on_down is not None:
            self.on_down(reason)

    def _fail_runs(self, reason: str) -> None:
        self._down = reason
        for run in self.live:
            run.death = reason
            run.wake.set()

    def allow(self, steps: int = 1, *, request_id: str | None = None) -> None:
        """Lets one live run, or all of them, take `steps` more steps."""
        if not self._is_stepped:
            raise RuntimeError("this engine follows the clock; create it with is_stepped=True to step it")
        for run in self.live:
            if request_id in (None, run.request.id):
                run.allowed += steps
                run.wake.set()

    async def until_runs(self, count: int) -> None:
        """Returns once `count` requests have begun since the engine was created."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.runs) >= count)

    @property
    def live(self) -> list[ScriptedRun]:
        """Runs that have not ended."""
        return [run for run in self.runs if run.end is None]

    @property
    def aborted(self) -> list[str]:
        """Ids of requests that the client cancelled."""
        return [run.request.id for run in self.runs if run.end == "aborted"]

    async def _begin(self, run: ScriptedRun) -> None:
        await self.check()
        async with self._arrived:
            self.runs.append(run)
            self._arrived.notify_all()

    def _next_script(self) -> Script:
        return self.upcoming.popleft() if self.upcoming else self.default

    async def _advance(self, run: ScriptedRun, duration: float) -> None:
        """Returns when one step is over, or at once if the run is preempted."""
        if self._is_stepped:
            while not (run.allowed or run.is_preempted or run.death):
                run.wake.clear()
                await run.wake.wait()
            run.allowed -= run.allowed > 0
        elif duration > 0:
            run.wake.clear()
            # Death and preemption set `wake` and end the step early.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(duration):
                    await run.wake.wait()
        else:
            await asyncio.sleep(0)
        self._require_alive(run)
        if run.script.engine_fails_after is not None and run.done >= run.script.engine_fails_after:
            self.die()
            self._require_alive(run)
        if run.script.request_fails_after is not None and run.done >= run.script.request_fails_after:
            raise BackendFailed(f"scripted failure after {run.done} tokens")

    def _require_alive(self, run: ScriptedRun) -> None:
        """A restarted engine does not continue the runs of its predecessor."""
        if run.death is not None:
            raise BackendDown(f"scripted engine {self.model!r}: {run.death}")

    @staticmethod
    @contextlib.contextmanager
    def _ending(run: ScriptedRun) -> Iterator[None]:
        """Records how the run ended, from how the block is left."""
        end = "aborted"
        try:
            yield
            end = "preempted" if run.is_preempted else "finished"
        except BackendDown:
            end = "died"
            raise
        except BackendFailed:
            end = "failed"
            raise
        finally:
            run.end = end
            run.ended.set()
