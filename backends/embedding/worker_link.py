"""Is the worker there, and what does it say? One worker process and the socket to it.

Rule: the socket is the worker's life line in both directions. Its end of file is the worker's death,
seen at once; closing it tells the worker to go. What then still runs is killed, and so is a worker that
leaves anything unanswered for too long.
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

from backends.embedding.handshake import EncoderOptions
from backends.embedding.ipc import HEADER, REQUEST_KIND, Frame, FrameKind, unpack_header
from backends.supervision import SchedulingDelay, Watchdog

_EXIT_GRACE_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class Heartbeat:
    """Wakes whoever waits for a sign of life."""

    event: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        self.event.set()
        self.event = asyncio.Event()


class WorkerLink:
    """Opened by `open`; `close` ends the process too. `is_stalled` once it was taken for dead."""

    def __init__(
        self,
        worker: asyncio.subprocess.Process,
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
        """Whatever is asked of the worker may take `stall_seconds`, and loading its model `load_seconds`."""
        server_end, worker_end = socket.socketpair()
        with worker_end:
            try:
                worker = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "backends.embedding.worker", str(worker_end.fileno()), options.to_json()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(worker_end.fileno(),),
                    env=_environment(options),
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
        return self._worker.pid

    @property
    def age_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._opened

    @property
    def pending_seconds(self) -> float:
        """How long anything was asked of it. When it has loaded: what that took."""
        return self._watchdog.counted_seconds

    async def receive(self) -> Frame | None:
        """The next frame, or None when the worker is gone."""
        try:
            kind, batch, size = unpack_header(await self._reader.readexactly(HEADER.size))
            frame = Frame(kind, batch, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if kind in REQUEST_KIND:
            self._watchdog.disarm((REQUEST_KIND[kind], batch))
        return frame

    def send(self, frame: Frame, *, timeout_seconds: float = 0.0) -> None:
        """Never waits: the caller bounds what is under way. Its answer may take `within` seconds, if that
        is more than anything may."""
        self._writer.write(frame.pack())
        self._watchdog.arm(_watchdog_key(frame), timeout_seconds)

    @property
    def was_killed(self) -> bool:
        """By somebody else than us; the system does that where memory runs out."""
        return self._worker.returncode == -signal.SIGKILL and not self._was_killed_here

    async def close(self) -> str:
        """How the worker ended. May be called again."""
        self._watchdog.end()
        # Aborted, because a plain close would first flush to a worker that may have stopped reading.
        self._writer.transport.abort()
        status = await self._wait_for_exit()
        if status is None:
            self._kill()
            status = await self._wait_for_exit()
        description = "it does not even heed being killed" if status is None else f"exit status {status}"
        description += ", killed by somebody, or by the system for want of memory" if self.was_killed else ""
        return f"it left something unanswered for too long; {description}" if self.is_stalled else description

    async def _wait_for_exit(self) -> int | None:
        """None while it is still there."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._worker.wait(), _EXIT_GRACE_SECONDS)
        return None

    def _expire(self) -> None:
        self.is_stalled = True
        self._kill()
        # Whoever listens hears the end even if the process does not heed that.
        self._writer.transport.abort()

    def _kill(self) -> None:
        self._was_killed_here = True
        with suppress(ProcessLookupError):
            self._worker.kill()


def _watchdog_key(frame: Frame) -> Hashable:
    """What its answer will settle: a RELEASE is answered like a PING."""
    kind = FrameKind.PING if frame.kind is FrameKind.RELEASE else frame.kind
    return kind, frame.batch


def _environment(options: EncoderOptions) -> dict[str, str]:
    # The worker must import what the server would, however the server's path came about.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment
