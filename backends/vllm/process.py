"""How does the engine end with its server? vLLM's engine process does not look whether anybody is left; its
worker processes do.

Rule: what vLLM runs in that process is run by a function of ours, which first sees to it that the process
ends with its parent. From the very start: loading a model takes minutes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from backends.leash import end_with_parent

_run = EngineCoreProc.run_engine_core


def run_engine_core(*given: Any, **named: Any) -> None:
    """A spawned process finds it by this name."""
    end_with_parent()
    _run(*given, **named)


@contextmanager
def leashed() -> Iterator[None]:
    """Engines that are started in here end with this process."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run)
