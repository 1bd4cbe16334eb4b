"""The stages of a start: one line each, and the first failure ends the others."""

import asyncio
import logging

import pytest

from controlplane.core.errors import BackendDown
from controlplane.core.start_stages import STAGE_OBSERVER, StartStage, enter_stage, note
from controlplane.service.runtime.start_progress import StartProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_each_stage_has_a_line_with_its_time_and_its_note(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = StartProgress(clock)

    async def start() -> None:
        clock.now += 7
        assert str(progress) == "loading m for 7.0 s"
        enter_stage(StartStage.WARMING_UP)
        clock.now += 2
        note("logprobs 1.5 s")
        assert progress.to_json() == {"seconds": 9.0, "parts": {"m": {"stage": "warming up", "seconds": 2.0}}}

    await progress.run({"m": start})
    assert caplog.messages == ["m: loading took 7.0 s", "m: warming up took 2.0 s (logprobs 1.5 s)"]
    clock.now += 50
    assert progress.to_json()["parts"] == {"m": {"stage": None, "seconds": 9.0}}
    assert STAGE_OBSERVER.get() is None


async def test_the_restart_of_a_part_is_no_stage_of_the_start(caplog):
    """The task that supervises a worker is created during its start and inherits its context."""
    caplog.set_level(logging.DEBUG, "tandem.start")
    progress, restarts = StartProgress(Clock()), []

    async def restart() -> None:
        await asyncio.sleep(0)
        enter_stage(StartStage.MEASURING)

    async def start() -> None:
        restarts.append(asyncio.create_task(restart()))

    await progress.run({"m": start})
    await restarts[0]
    assert (progress.parts["m"].stage, caplog.messages) == (None, ["m: loading took 0.0 s"])


async def test_a_start_in_no_time_has_no_line(caplog):
    """`tandem tune` starts simulated engines hundreds of times, beside its progress bar."""
    caplog.set_level(logging.INFO)

    async def start() -> None:
        enter_stage(StartStage.WARMING_UP)

    progress = StartProgress(Clock())
    await progress.run({"m": start})
    assert (progress.parts["m"].stage, caplog.messages) == (None, [])


async def test_the_first_failure_ends_the_other_starts():
    ended = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    async def failing() -> None:
        raise BackendDown("no such model")

    with pytest.raises(BackendDown, match="no such model"):
        await StartProgress(Clock()).run({"slow": slow, "failing": failing})
    assert ended == ["slow"]


async def test_a_cancellation_ends_all_starts():
    async def slow() -> None:
        await asyncio.Event().wait()

    starting = asyncio.create_task(StartProgress(Clock()).run({"a": slow, "b": slow}))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == {asyncio.current_task()}
