"""Starts the parts of the service side by side, and records which stage each is in and since when.

One log line is written at the end of each stage that took time; simulated engines start in none, and a replay
starts them once for each simulation. The first failure ends the start of all parts, since another
model may load for minutes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from controlplane.core.start_stages import STAGE_OBSERVER, StartStage

log = logging.getLogger("tandem.start")

PREPARING = "preparing"
"""Shown while no part has begun to start, and after the last has started."""
_LEAST_SECONDS = 0.05


class PartStart:
    """The start of one part: its present stage, and the seconds of the stages that have ended."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.stage: StartStage | None = StartStage.LOADING
        """None once the part has started."""
        self.finished: dict[StartStage, float] = {}
        self._clock = clock
        self._began = self._entered = clock()
        self._ended: float | None = None
        self._note = ""

    @property
    def seconds(self) -> float:
        """Time since the part began to start, or the whole time if it has started."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    @property
    def stage_seconds(self) -> float:
        """Time since the present stage began."""
        return self._clock() - self._entered

    def enter(self, stage: StartStage) -> None:
        """Begins another stage; ignored after the end, as in the restart of a part."""
        if self.stage is not None and stage is not self.stage:
            self._end_stage(self.stage)
            self.stage = stage

    def note(self, text: str) -> None:
        """Adds details to the line about the present stage."""
        self._note = f" ({text})"

    def end(self) -> None:
        """Ends the last stage."""
        if self.stage is not None:
            self._end_stage(self.stage)
            self.stage, self._ended = None, self._entered

    def _end_stage(self, stage: StartStage) -> None:
        self.finished[stage] = took = self.stage_seconds
        level = logging.INFO if took >= _LEAST_SECONDS else logging.DEBUG
        log.log(level, "%s: %s took %.1f s%s", self.name, stage.value, took, self._note)
        self._note, self._entered = "", self._clock()


class StartProgress:
    """The start of all parts; `parts` are those that have begun."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.parts: dict[str, PartStart] = {}
        self._clock = clock
        self._began = clock()

    @property
    def seconds(self) -> float:
        """Time since the start began."""
        return self._clock() - self._began

    async def run(self, starts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Starts all parts at once, by name. Raises the first error after the other starts were cancelled."""
        self._began = self._clock()
        self.parts = {name: PartStart(name, self._clock) for name in starts}
        tasks = [asyncio.create_task(self._run(self.parts[name], start)) for name, start in starts.items()]
        if not tasks:
            return
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    @staticmethod
    async def _run(part: PartStart, start: Callable[[], Awaitable[None]]) -> None:
        STAGE_OBSERVER.set(part)
        await start()
        part.end()

    def __str__(self) -> str:
        starting = [part for part in self.parts.values() if part.stage is not None]
        stages = [f"{part.stage} {part.name} for {part.stage_seconds:.1f} s" for part in starting]
        return ", ".join(stages) or PREPARING

    def to_json(self) -> dict[str, object]:
        """The seconds so far, and the stage of each part with its seconds; null: the part has started."""
        return {
            "seconds": round(self.seconds, 1),
            "parts": {
                part.name: {
                    "stage": part.stage,
                    "seconds": round(part.seconds if part.stage is None else part.stage_seconds, 1),
                }
                for part in self.parts.values()
            },
        }
