"""An engine that fails to shut down, or is cancelled in it, leaves no process that compiles grammars."""

import asyncio
import threading

import pytest

from backends.vllm.client import VllmGenerator


class EndedGrammars:
    """Counts its ends."""

    ends = 0

    async def stop(self) -> None:
        self.ends += 1


class StubbornEngine:
    """An engine whose shutdown waits for `may_end` and then raises."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def fail_pending(self) -> None:
        """No stream is open."""

    def shutdown(self) -> None:
        self.began.set()
        assert self.may_end.wait(10)
        raise RuntimeError("the device is lost")


@pytest.fixture
def stubborn(monkeypatch) -> tuple[VllmGenerator, StubbornEngine, EndedGrammars]:
    generator, engine, grammars = VllmGenerator("any"), StubbornEngine(), EndedGrammars()
    monkeypatch.setattr(generator, "_engine", engine)
    monkeypatch.setattr(generator, "_grammars", grammars)
    return generator, engine, grammars


async def test_a_shutdown_that_fails(stubborn):
    generator, engine, grammars = stubborn
    engine.may_end.set()
    with pytest.raises(RuntimeError, match="the device is lost"):
        await generator.stop()
    assert grammars.ends == 1


async def test_a_shutdown_that_is_cancelled(stubborn):
    generator, engine, grammars = stubborn
    stopping = asyncio.create_task(generator.stop())
    assert await asyncio.to_thread(engine.began.wait, 10)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    engine.may_end.set()
    assert grammars.ends == 1
