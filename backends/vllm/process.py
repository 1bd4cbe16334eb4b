"""Ends the engine process when the server exits, and ends pending utility calls when the engine exits.

vLLM's worker processes exit when their parent dies; its EngineCore process does not. So EngineCore is started
through `run_engine_core`, which first binds the process to its parent. This holds while the model loads,
which takes minutes.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import multiproc_executor, uniproc_executor

from backends.run_directory import run_directory
from backends.supervision import end_with_parent
from backends.vllm.compat import EngineDeadError
from backends.vllm.idle_trim import trim_while_idle

_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"
_RENDEZVOUS_FILE = "get_file_store_init_method"
_run_engine_core = EngineCoreProc.run_engine_core


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Runs EngineCore in a process that exits with its parent; the spawned process imports it by name."""
    end_with_parent()
    trim_while_idle()
    _put_rendezvous_file_in_run_directory()
    _run_engine_core(*args, **kwargs)


def _put_rendezvous_file_in_run_directory() -> None:
    """Puts the file through which torch.distributed connects the engine's workers beside its sockets.

    vLLM names one in the temporary folder (`get_file_store_init_method`); a killed engine leaves it there.
    """
    if (folder := os.environ.get(_SOCKET_FOLDER)) is None:
        return
    for executor in (uniproc_executor, multiproc_executor):
        # Older releases of vLLM use a port.
        if hasattr(executor, _RENDEZVOUS_FILE):
            setattr(executor, _RENDEZVOUS_FILE, lambda: f"file://{folder}/vllm_dist_{uuid4().hex}")


@contextmanager
def bound_to_parent() -> Iterator[None]:
    """Makes engines started within the context exit with this process."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run_engine_core)


@contextmanager
def sockets_in_run_directory() -> Iterator[None]:
    """Puts the sockets of engines started within the context where the next server finds those left behind.

    A path that the operator has set is kept.
    """
    is_set = _SOCKET_FOLDER in os.environ
    if not is_set:
        os.environ[_SOCKET_FOLDER] = str(run_directory())
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_SOCKET_FOLDER, None)


Result = TypeVar("Result")


async def while_alive(llm: Any, call: Awaitable[Result]) -> Result:
    """Awaits a utility call of vLLM's AsyncLLM and raises EngineDeadError as soon as the engine is dead.

    When an engine dies, vLLM ends every stream but no pending utility call.
    """
    # The task that reads the outputs ends with the engine; otherwise it would start with the first request.
    llm._run_output_handler()
    pending = asyncio.ensure_future(call)
    try:
        await asyncio.wait({pending, llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not pending.done():
            raise EngineDeadError
        return pending.result()
    finally:
        pending.cancel()
