"""Executor whose CPU engine can switch asynchronous scheduling on and off while it runs.

    distributed_executor_backend="tests.overlap.Overlapping"
    await llm.engine_core.call_utility_async("overlap", True)

vLLM does not overlap steps on a CPU. Here the next step is scheduled before the engine has processed the
output of the last one, which is all that a scheduler observes; the model still computes sequentially.
"""

import os

from vllm.v1.engine.core import EngineCore

from backends.vllm.cpu_executor import InProcessExecutor
from backends.vllm.plugin.shared_state import ENVIRONMENT
from backends.vllm.scheduler import make
from backends.vllm.simulation.stepped_engine import replace_scheduler


class Overlapping(InProcessExecutor):
    """Loads this module in the engine's process, which adds the utility call `overlap` to EngineCore."""


def _overlap(core, is_ahead):
    board = core.scheduler._shared_state
    # The file named there no longer exists; the new scheduler takes over the open shared state.
    os.environ.pop(ENVIRONMENT, None)
    replace_scheduler(core, make, is_async=is_ahead)._shared_state = board
    return type(core.scheduler).__name__


EngineCore.overlap = _overlap
