"""Runs a single-rank CPU model inside the EngineCore process instead of a worker process.

vLLM starts the CPU worker as a process of its own. Between steps, worker and engine poll shared memory
without sleeping for a second after every message, which costs more than one core while requests run. With one
rank the engine process can run the model itself. Torch gets as many threads as in vLLM's arrangement: one
fewer than there are cores, unless OMP_NUM_THREADS is set.

The engine's input and output threads then compete with the model for the interpreter lock. They wait for
Python's switch interval each time, which by default is longer than a step of a small model, so it is
shortened.
"""

import os
import sys

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_SWITCH_SECONDS = 0.0002


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's UniProcExecutor with the thread count and switch interval of a process shared with the model."""

    def _init_executor(self) -> None:
        # vLLM refuses to change the thread count once the worker has started.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        sys.setswitchinterval(_SWITCH_SECONDS)
        super()._init_executor()
