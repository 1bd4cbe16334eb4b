"""A part that fails to stop does not keep the others from stopping."""

import asyncio
import logging

import pytest

from backends.testing.scripted import ScriptedEmbedder
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.config import parse
from controlplane.core.errors import BackendDown
from controlplane.service.bootstrap import build_service
from controlplane.service.runtime.staged_stop import stop_all
from controlplane.service.runtime.timers import LoopClock


def error_lines(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


async def fail() -> None:
    raise ValueError("cannot be kept")


def fail_at_once() -> None:
    raise RuntimeError("stopped before")


def test_every_part_is_stopped_and_every_failure_logged(caplog):
    stopped = []

    async def stop(name: str) -> None:
        await asyncio.sleep(1)
        stopped.append(name)

    first = {"a": fail, "b": lambda: stop("b"), "c": fail_at_once}
    run(stop_all(first, {"d": lambda: stopped.append("d")}, {"e": lambda: stop("e"), "f": fail}))
    assert stopped == ["b", "d", "e"]
    assert [message.split(":")[0] for message in error_lines(caplog)] == [
        f"{name} failed to stop" for name in "acf"
    ]
    assert "cannot be kept" in caplog.text and "stopped before" in caplog.text


def test_a_cancellation_still_runs_the_remaining_stages():
    stopped = []

    async def main():
        begun = asyncio.Event()

        async def never() -> None:
            begun.set()
            await asyncio.Event().wait()

        stopping = asyncio.create_task(
            stop_all({"drain": never}, {"engine": lambda: stopped.append("engine")})
        )
        await begun.wait()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping

    run(main())
    assert stopped == ["engine"]


@pytest.fixture
def service():
    found = build_service(
        parse({"models": {"embeddings": [{"model": "one"}]}}),
        [], [ScriptedEmbedder(model="one", bytes_per_token=1)], workspace_bytes=10_000, clock=LoopClock(),
    )  # fmt: skip
    found._training = Unsaved()
    return found


class Unsaved:
    """Length training whose file cannot be written."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        await fail()


def test_engines_stop_even_if_the_length_model_cannot_be_saved(service, caplog):
    async def main():
        await service.start()
        [engine] = service.encoders.values()
        await engine.check()
        await service.stop()
        with pytest.raises(BackendDown, match="stopped"):
            await engine.check()

    run(main())
    assert error_lines(caplog) == ["length training failed to stop: ValueError('cannot be kept')"]


def test_a_failed_start_raises_its_own_error_and_leaves_no_engine(service, caplog):
    service._training.start = fail_at_once

    async def main():
        with pytest.raises(RuntimeError, match="stopped before"):
            await service.start()
        with pytest.raises(BackendDown, match="stopped"):
            [engine] = service.encoders.values()
            await engine.check()

    run(main())
    assert len(error_lines(caplog)) == 1
