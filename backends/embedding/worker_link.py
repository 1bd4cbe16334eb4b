"""One embedding worker process and the socket that connects the server to it.

End of file on the socket reports the worker's death immediately; closing the socket makes the worker exit. A
worker that does not exit within a grace period, or misses a deadline of the watchdog, is killed.
"""

import asyncio
import math
import os
import signal
import socket
import sys
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field

from backends.child_process import ChildProcess
from backends.embedding.handshake import EncoderOptions
from backends.embedding.ipc import HEADER, REQUEST_KIND, Frame, FrameKind, unpack_header
from backends.supervision import SchedulingDelay, Watchdog
from controlplane.core.start_stages import StartStage, enter_stage

_EXIT_GRACE_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class Heartbeat:
    """Wakes the coroutines that wait for the next frame from the worker."""

    event: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wakes all current waiters; later ones wait for the next call."""
        self.event.set()
        self.event = asyncio.Event()


class WorkerLink:
    """Connection to one worker process; `open` starts the process and `close` ends it.

    `is_stalled` is True once the watchdog has killed the worker.
    """

    def __init__(
        self,
        worker: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stall_seconds: float,
    ) -> None:
        self._worker = worker
        self._reader = reader
        self._writer = writer
        self._watchdog = Watchdog(stall_seconds, self._expire, SchedulingDelay(worker.pid))
        self._opened = asyncio.get_running_loop().time()
        self.is_stalled = False
        self._was_killed_here = False

    @classmethod
    async def open(
        cls, options: EncoderOptions, *, stall_seconds: float, load_seconds: float = math.inf
    ) -> "WorkerLink":
        """Starts a worker.

        Args:
            options: model and settings of the worker.
            stall_seconds: deadline of every request to the worker.
            load_seconds: deadline of loading the model, if longer.
        """
        server_end, worker_end = socket.socketpair()
        with worker_end:
            descriptor = worker_end.fileno()
            try:
                worker = ChildProcess(
                    [sys.executable, "-m", "backends.embedding.worker", str(descriptor), options.to_json()],
                    descriptors=[descriptor],
                    environment=_environment(options),
                )
            except BaseException:
                server_end.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=server_end)
        link = cls(worker, reader, writer, stall_seconds)
        link._watchdog.arm((FrameKind.READY, 0), load_seconds)
        return link

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    @property
    def age_seconds(self) -> float:
        """Seconds since the worker was started."""
        return asyncio.get_running_loop().time() - self._opened

    @property
    def pending_seconds(self) -> float:
        """Seconds in which a response was pending; right after READY, the time that loading took."""
        return self._watchdog.counted_seconds

    async def started(self) -> Frame | None:
        """The frame that ends the worker's start, READY or LOAD_FAILED; None if the worker is gone."""
        first = await self.receive()
        if first is not None and first.kind is FrameKind.MEASURING:
            enter_stage(StartStage.MEASURING)
            first = await self.receive()
        return first

    async def receive(self) -> Frame | None:
        """Next frame, or None if the worker is gone."""
        try:
            kind, number, size = unpack_header(await self._reader.readexactly(HEADER.size))
            frame = Frame(kind, number, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if kind in REQUEST_KIND:
            self._watchdog.disarm((REQUEST_KIND[kind], number))
        return frame

    def send(self, frame: Frame, *, timeout_seconds: float = 0.0) -> None:
        """Writes a frame without waiting and starts the deadline of its response.

        The caller bounds the frames in flight. `timeout_seconds` extends the deadline beyond `stall_seconds`.
        """
        self._writer.write(frame.pack())
        self._watchdog.arm(_watchdog_key(frame), timeout_seconds)

    @property
    def was_killed(self) -> bool:
        """Whether another process or the kernel's OOM killer killed the worker with SIGKILL."""
        return self._worker.returncode == -signal.SIGKILL and not self._was_killed_here

    async def close(self) -> str:
        """Ends the worker and describes how it ended. Idempotent."""
        self._watchdog.stop()
        # `close` would first flush to a worker that may have stopped reading.
        self._writer.transport.abort()
        status = await self._wait_for_exit()
        if status is None:
            self._kill()
            status = await self._wait_for_exit()
        description = "it does not exit even after SIGKILL" if status is None else f"exit status {status}"
        description += ", killed by another process or by the OOM killer" if self.was_killed else ""
        return f"no response within its deadline; {description}" if self.is_stalled else description

    async def _wait_for_exit(self) -> int | None:
        """Exit status, or None if the worker still runs after the grace period."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._worker.wait(), _EXIT_GRACE_SECONDS)
        return None

    def _expire(self) -> None:
        self.is_stalled = True
        self._kill()
        # `receive` then returns None even if the process does not exit.
        self._writer.transport.abort()

    def _kill(self) -> None:
        self._was_killed_here = True
        with suppress(ProcessLookupError):
            self._worker.kill()


def _watchdog_key(frame: Frame) -> Hashable:
    """Deadline that the response to `frame` ends; RELEASE gets the same response as PING."""
    kind = FrameKind.PING if frame.kind is FrameKind.RELEASE else frame.kind
    return kind, frame.number


def _environment(options: EncoderOptions) -> dict[str, str]:
    # The worker must import the same modules as the server, however the server's path was set.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment | dict(options.environment)
