"""Differences between the supported vLLM releases, 0.26 up to 0.33.

Importing this module imports vLLM, which takes seconds.

Tested, each unpacked into an environment with torch 2.13 (0.26 asks for 2.11): the scheduler in a stepped
engine and behind a live one, without a model (`tests/backends/vllm/test_scheduler_counts.py`,
`tests/backends/vllm/simulation/test_executor.py`: 47 tests), on the CPU builds of 0.26.0, 0.27.1, 0.28.0,
0.29.0, 0.30.0, 0.31.0 and 0.32.0, and on the Python code of the CUDA build of 0.33.0, which has no CPU build.
Real models ran with 0.29.0 (`tests/backends/vllm/test_scheduler_outputs.py`: 8 tests), with 0.26.0 and
torch 2.11 (that file, `test_scheduler_counts.py`, a server with structured output on a CPU, one under load
on an H100) and, with all tests, with 0.32.0. In 0.26.0 and 0.33.0 every name imported or overridden here was
looked up.

- 0.26 to 0.28 raise subclasses of ValueError for invalid requests; 0.29 introduced `VLLMClientError`, which
  is not a ValueError.
- 0.26 (but not 0.29) drops the output of a step in flight for a request preempted meanwhile; later releases
  deliver it, and `_preempt_request` takes one more argument, which is passed on. A request preempted outside
  `schedule()` must therefore not restart in the same step; Tandem's scheduler never offers it in that step.
- In 0.26 to 0.30 a request that a step skipped, or whose grammar is not compiled yet, waits in
  `skipped_waiting`, from which vLLM would start it without an offer; `SkippedQueue` takes its place. From
  0.32 on it waits in `kv_holding_waiting` or, marked, in `waiting`.
- Up to 0.32 a step schedules no further request after a running request that preempted itself; 0.33
  continues with the next. Tandem's plan frees the blocks first, so this happens only if memory still runs
  out.
- 0.26 and 0.32 have two model runners; the second is the default on a GPU. If a request asks for the log
  probabilities of its prompt, the second computes those of all tokens of the step, 1,024 at once, the first
  those of that prompt (`prompt_logits`). Other releases were not read.
- On a CPU 0.26 frees the query, key and value weights that hidden states in the cache need.
- 0.26 has no choice of the cache's layout (`compact_layouts`) and no `req_idx` in the attention metadata.
- 0.31 introduced `max_num_active_seqs`, which may be less than `max_num_seqs` (see `max_running_requests`).
- Token prompts (`tokens_input`), `Parser.parse_delta`, `SchedulerStats` and the constructor of `AsyncLLM`, as
  used here, are the same in all.
"""

import re
from importlib import import_module
from typing import Any

import vllm
import vllm.exceptions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

OLDEST = (0, 26)
FIRST_UNSUPPORTED = (0, 34)

__all__ = [
    "CLIENT_ERRORS",
    "EngineDeadError",
    "EngineGenerateError",
    "check_release",
    "client_message",
    "compact_layouts",
    "max_running_requests",
]

CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
)


# For attention backends that state no cache layouts; vLLM also prefers the first.
_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
_CPP_LOG_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


def client_message(error: Exception) -> str:
    """The message of one of CLIENT_ERRORS without the time and line of xgrammar's C++ log."""
    message = str(error.args[0]) if error.args else str(error)
    return _CPP_LOG_PREFIX.sub("", message).strip()


def check_release() -> None:
    """Raises RuntimeError for a vLLM release that this backend was not tested with."""
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not OLDEST <= found < FIRST_UNSUPPORTED:
        raise RuntimeError(
            f"vllm {vllm.__version__} is not supported; "
            "install 0.26 to 0.33, for example with the 'vllm' extra"
        )


def max_running_requests(scheduler_config: Any) -> int:
    """Limit on running requests under a vLLM SchedulerConfig."""
    active_limit: int | None = getattr(scheduler_config, "max_num_active_seqs", None)
    slots: int = scheduler_config.max_num_seqs
    return slots if active_limit is None else active_limit


def compact_layouts(backend: Any) -> tuple[Any, ...] | None:
    """The cache layouts of an attention backend in which the elements of a block are contiguous.

    None in a release without layouts, where they always are.
    """
    if not hasattr(backend, "supported_kv_cache_layouts"):
        return None
    known = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    stated = backend.supported_kv_cache_layouts() or [known[name] for name in _LAYOUTS]
    return tuple(layout for layout in stated if layout.is_block_compact)
