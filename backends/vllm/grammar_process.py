"""Starts the process that compiles grammars and sends it one grammar per connection."""

import asyncio
import json
import logging
import multiprocessing
import signal
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from backends.run_directory import run_directory
from backends.vllm.grammar_compiler import Reply, run
from backends.vllm.grammar_limits import GrammarLimits
from controlplane.core.errors import BackendDown, BackendFailed

log = logging.getLogger(__name__)

_serial = count(1)


class GrammarProcess:
    """The process that loads vLLM's compilers once; started again if it has ended."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._config: Future[Any] = Future()
        self._is_stopped = True
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._loading: asyncio.Task[str] | None = None

    def start(self) -> None:
        """Begins to load the compilers, which takes 10 to 20 s of a core; `configure` comes later."""
        self._config, self._is_stopped = Future(), False
        self._begin()

    def configure(self, config: Any) -> None:
        """States the VllmConfig of the engine, which the compilers need last."""
        self._config.set_result(config)

    async def ready(self) -> str:
        """The path of the socket, once the compilers are loaded.

        Raises BackendFailed if they do not load, BackendDown if the process is stopped with its engine.
        """
        try:
            if self._loading is not None:
                return await asyncio.shield(self._loading)
        except BackendFailed:
            if not self._is_stopped:
                raise
        raise BackendDown("the engine that the grammar is for is not running")

    async def stop(self) -> None:
        """Ends the process; pending compilations raise BackendDown."""
        loading, self._loading, self._is_stopped = self._loading, None, True
        if loading is None:
            return
        self._config.cancel()
        # In a thread: a process that has loaded vLLM takes 50 ms and more to end.
        await asyncio.to_thread(self._kill)
        # Its thread ends once the process has.
        with suppress(BackendFailed):
            await asyncio.shield(loading)
        await asyncio.to_thread(self._kill)

    def _begin(self) -> None:
        self._loading = asyncio.create_task(asyncio.to_thread(self._load))

    async def compile(self, stated: Mapping[str, Any]) -> Reply:
        """The reply of `EngineGrammars.check`, or {"signal": number}. Raises BackendFailed, BackendDown."""
        if self._loading is not None and self._loading.done() and self._loading.exception() is not None:
            self._begin()
        for is_last in (False, True):
            loading, path = self._loading, await self.ready()
            try:
                return await _exchange(path, stated)
            except (OSError, ValueError) as error:
                # Killed, for example by the kernel for lack of memory.
                log.warning("the process that compiles grammars failed: %r", error)
                # Another request may have restarted it.
                if not is_last and self._loading is loading:
                    self._begin()
        raise BackendFailed("the process that compiles grammars has ended; its log says why")

    def _load(self) -> str:
        """Starts the process and returns the path of its socket once it has loaded the compilers."""
        self._kill()
        context = multiprocessing.get_context("spawn")
        path = str(run_directory() / f"grammars-{next(_serial)}")
        # The process ends when this end of the pipe closes.
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, path, self._limits), name="grammars", daemon=True)
        # The end of a terminal sends SIGHUP to the whole process group. The process, and Python's resource
        # tracker if it starts here, inherit the mask of this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})
        try:
            process.start()
            self._process = process
            theirs.close()
            config = self._config.result()
            if self._is_stopped:
                self._kill()
            self._pipe.send(config)
            problem: str | None = self._pipe.recv()
        except (OSError, EOFError, CancelledError) as error:
            raise BackendFailed("the process that compiles grammars ended while it loaded") from error
        if problem is not None:
            raise BackendFailed(f"the process that compiles grammars does not load: {problem}")
        return path

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()


async def _exchange(path: str, stated: Mapping[str, Any]) -> Reply:
    """Sends one request. Raises OSError if the process has ended, ValueError for an incomplete reply."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(json.dumps(stated).encode())
        writer.write_eof()
        reply: Reply = json.loads(await reader.read())
    finally:
        writer.close()
    return reply
