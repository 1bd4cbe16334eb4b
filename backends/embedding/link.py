"""Is the worker there, and what does it say? One worker process and the socket to it.

Rule: the socket is the worker's life line in both directions. Its end of file is the worker's death,
seen at once; closing it tells the worker to go. What then still runs is killed.
"""

import asyncio
import os
import socket
import sys
from dataclasses import dataclass, field

from backends.embedding.contract import EncoderOptions
from backends.embedding.framing import HEAD, Frame, unpack_head

_GRACE_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class Signs:
    """Wakes whoever waits for a sign of life."""

    event: asyncio.Event = field(default_factory=asyncio.Event)

    def saw_one(self) -> None:
        self.event.set()
        self.event = asyncio.Event()


class WorkerLink:
    """Opened by `open`; `close` ends the process too."""

    def __init__(
        self,
        worker: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._worker = worker
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, options: EncoderOptions) -> "WorkerLink":
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                worker = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "backends.embedding.worker", str(theirs.fileno()), options.to_json()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(options),
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(worker, reader, writer)

    @property
    def pid(self) -> int:
        return self._worker.pid

    async def receive(self) -> Frame | None:
        """The next frame, or None when the worker is gone."""
        try:
            kind, batch, size = unpack_head(await self._reader.readexactly(HEAD.size))
            return Frame(kind, batch, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, frame: Frame) -> None:
        """Never waits: the caller bounds what is under way."""
        self._writer.write(frame.pack())

    async def close(self) -> int:
        """The worker's exit status; negative for a signal. May be called again."""
        # Aborted, because a plain close would first flush to a worker that may have stopped reading.
        self._writer.transport.abort()
        try:
            return await asyncio.wait_for(self._worker.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self._worker.kill()
            return await self._worker.wait()


def _environment(options: EncoderOptions) -> dict[str, str]:
    # The worker must import what the server would, however the server's path came about.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment
