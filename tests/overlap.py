"""vLLM's engine on a CPU, a step ahead of its output as on a GPU, or not: told while it runs.

    distributed_executor_backend="tests.overlap.Overlapping"
    await llm.engine_core.call_utility_async("overlap", True)

vLLM overlaps steps on no CPU. Here the next step is scheduled before the engine has seen what came of the
last, which is all that a scheduler can tell; the model computes them one after the other.
"""

import os

from vllm.v1.engine.core import EngineCore

from backends.vllm.cpu_executor import InProcessExecutor
from backends.vllm.plugin.shared_state import ENVIRONMENT
from backends.vllm.scheduler import make
from backends.vllm.simulation.stepped_engine import begin_anew


class Overlapping(InProcessExecutor):
    """Where it runs, this module is loaded, so that the engine can be told."""


def _overlap(core, is_ahead):
    board = core.scheduler._board
    # The file that it names has none any more.
    os.environ.pop(ENVIRONMENT, None)
    begin_anew(core, make, is_async=is_ahead)._board = board
    return type(core.scheduler).__name__


EngineCore.overlap = _overlap
