"""Passes are announced while they are under way, and withheld ones are decided again."""

import asyncio
import os
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from backends.embedding.batch_dispatcher import BatchDispatcher, PendingCall
from backends.embedding.budget import PassBudget
from backends.embedding.ipc import Frame, FrameKind, PassResult
from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.pass_sender import PassSender
from backends.embedding.time_model import ObservedTime, PassTime
from controlplane.core.clock import Instant, seconds
from controlplane.core.engine_reports import DeviceSharing
from controlplane.core.errors import BackendDown


class Hooks:
    def __init__(self) -> None:
        self.announced: list[bool] = []
        self.on_computing = self.announced.append
        self.pause_cost = None


class Bench:
    """A sender with one call of 4 inputs; `sent` holds the numbers of its batches."""

    def __init__(self) -> None:
        self.hooks, self.dispatcher, self.sent = Hooks(), BatchDispatcher(), []
        self.is_sent = asyncio.Event()
        memory = EmbeddingMemory(0, 10.0, 8)
        self.dispatcher.worker_started(PassBudget(1_000, 1, memory, ObservedTime(PassTime(0.001, 1e-4, 0.0))))
        self.sender = PassSender(self.dispatcher, self.hooks)
        inputs = [np.zeros(10, dtype=np.uint32)] * 4
        call = PendingCall(inputs, np.zeros((4, 2), dtype=np.float32), lambda error: None)
        self.dispatcher.put(call, deadline=Instant(seconds(10**6)))

    def send_frame(self, frame: Frame) -> None:
        assert frame.kind is FrameKind.BATCH
        self.sent.append(frame.number)
        self.is_sent.set()

    def answer(self) -> None:
        result = PassResult(np.zeros((4, 2), dtype=np.float32), 1_000_000, 0)
        self.dispatcher.pass_finished(self.sent[-1], result, Instant(0))
        self.sender.send(starts_small=False)


async def test_a_pass_is_announced_from_its_start_to_its_end():
    bench = Bench()
    bench.sender.worker_ready(0, bench.send_frame, may_idle=False)
    assert bench.sent == [] and bench.hooks.announced == []
    bench.sender.send()
    bench.sender.send()
    assert bench.sent == [1] and bench.hooks.announced == [True]
    bench.answer()
    assert bench.hooks.announced == [True, False]


async def test_the_sender_knows_how_passes_share_the_device():
    bench = Bench()
    # No process has this id.
    for may_idle, sharing in ((False, DeviceSharing.BESIDE), (True, DeviceSharing.IDLE)):
        bench.sender.worker_ready(2**31 - 1, bench.send_frame, may_idle=may_idle)
        assert bench.sender.sharing is sharing


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that can be moved between scheduling classes."""
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("the system has no idle class")
    with subprocess.Popen(["sleep", "600"]) as found:
        yield found
        found.kill()


async def test_a_worker_that_could_not_leave_the_idle_class_does_not_enter_it(worker, monkeypatch, caplog):
    """The gate is made after the workers have started; each pass would fail if it could not move them."""
    monkeypatch.setattr("backends.embedding.pass_sender.may_leave_idle_class", lambda: False)
    bench = Bench()
    bench.sender.worker_ready(worker.pid, bench.send_frame, may_idle=True)
    bench.hooks.pause_cost = lambda: lambda pauses: [0.0] * len(pauses)
    assert os.sched_getscheduler(worker.pid) == os.SCHED_OTHER
    await bench.is_sent.wait()
    assert os.sched_getscheduler(worker.pid) == os.SCHED_OTHER
    assert bench.sender.sharing is DeviceSharing.BESIDE
    assert caplog.text.count("embedding workers stay in the normal scheduling class") == 1


async def test_a_worker_without_a_gate_computes_in_the_idle_class(worker):
    bench = Bench()
    bench.sender.worker_ready(worker.pid, bench.send_frame, may_idle=True)
    await bench.is_sent.wait()
    assert os.sched_getscheduler(worker.pid) == os.SCHED_IDLE


async def test_a_withheld_pass_is_sent_once_it_is_worth_its_cost():
    bench, costs = Bench(), [0.0, 9.0, 9.0]

    def pause_cost():
        cost = costs.pop()
        return lambda pauses: [cost] * len(pauses)

    bench.hooks.pause_cost = pause_cost
    # The last pass ends later, so that no floor accumulates.
    bench.dispatcher._last_end = Instant(2**62)
    bench.sender.worker_ready(0, bench.send_frame, may_idle=False)
    async with asyncio.timeout(30):
        await bench.is_sent.wait()
    assert costs == [], "it was decided again until it cost nothing"
    bench.sender.worker_gone()


async def test_a_defect_of_the_sender_fails_the_calls_that_nothing_would_send():
    bench, errors = Bench(), []
    [call] = bench.dispatcher._queue.drain()
    call.payload.on_done = errors.append
    bench.dispatcher.put(call.payload, deadline=None)
    bench.sender.worker_ready(0, bench.send_frame, may_idle=False)

    def pause_cost():
        raise IndexError("list index out of range")

    bench.hooks.pause_cost = pause_cost
    with pytest.raises(IndexError):
        bench.sender.send()
    [error] = errors
    assert isinstance(error, BackendDown) and "no embedding pass can be sent: IndexError" in str(error)
