"""A cancelled start does not wait for the import of vLLM and leaves no engine process."""

import asyncio
import multiprocessing
import threading
import time

import pytest

from backends.vllm import client
from backends.vllm.client import VllmGenerator
from controlplane.core.errors import BackendDown


async def test_a_start_is_cancelled_at_once_while_vllm_is_imported(monkeypatch):
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def load():
        begun.set()
        may_end.wait(60)
        ended.set()

    monkeypatch.setattr(client, "_load_engine", load)
    generator = VllmGenerator("any")
    start = asyncio.create_task(generator.start())
    assert await asyncio.to_thread(begun.wait, 10)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(start, 10)
    assert not ended.is_set()
    await generator.stop()
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 10)


async def test_an_engine_process_that_starts_after_the_cancellation_is_terminated(monkeypatch):
    begun, may_launch = threading.Event(), threading.Event()

    class Late:
        def __init__(self, *_given, **_named):
            begun.set()
            assert may_launch.wait(10)
            spawned = multiprocessing.get_context("spawn").Process(
                target=time.sleep, args=(30,), name="EngineCore_DP0"
            )
            spawned.start()
            spawned.join()
            raise RuntimeError("the engine ended while it started")

    monkeypatch.setattr(client, "_load_engine", lambda: Late)
    generator = VllmGenerator("any")
    start = asyncio.create_task(generator.start())
    assert await asyncio.to_thread(begun.wait, 10)
    start.cancel()
    # Only after the cancelled start has looked for processes once.
    while not generator._is_start_cancelled:  # noqa: ASYNC110 (no event to wait for)
        await asyncio.sleep(0)
    may_launch.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(start, 20)
    assert multiprocessing.active_children() == []


async def test_a_failed_import_of_vllm_raises_backend_down(monkeypatch):
    def load():
        raise ImportError("no such library")

    monkeypatch.setattr(client, "_load_engine", load)
    with pytest.raises(BackendDown, match="no such library"):
        await VllmGenerator("any").start()
