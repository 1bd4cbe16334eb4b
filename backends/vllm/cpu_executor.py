"""Who runs the model on a CPU? The engine's own process, so that nobody spins beside the embedding model.

vLLM puts one CPU worker into a process of its own, and between steps worker and engine poll shared
memory without sleeping, for a second after every message: while anybody chats, more than a core is
burnt. With one rank the engine can compute itself. The arithmetic gets as many threads as vLLM's own
arrangement would give: one core fewer than there are, unless OMP_NUM_THREADS says otherwise.

The threads that take requests in and send tokens out then share the interpreter with the model. Each time it
must be asked for it, which takes Python's switch interval: by default longer than a small model's step.
"""

import os
import sys

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_SWITCH_SECONDS = 0.0002


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    def _init_executor(self) -> None:
        # Before the worker starts: afterwards vLLM refuses to change the number.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        sys.setswitchinterval(_SWITCH_SECONDS)
        super()._init_executor()
