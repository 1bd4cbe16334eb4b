"""Which vLLM is this? Every difference between the supported releases that we meet, in one place.

Supported: 0.26 up to, but without, 0.34. Importing this module imports vLLM, which takes seconds.

Run for this, each unpacked before an environment with torch 2.13 (0.26 asks for 2.11): the scheduler in a
stepped engine and behind a live one, without a model (`test_scheduler_counts`, `test_simexec`: 47 tests), on
the CPU builds of 0.26.0, 0.27.1, 0.28.0, 0.29.0, 0.30.0, 0.31.0 and 0.32.0, and on the Python code of the
CUDA build of 0.33.0, which has no CPU build. Real models ran with 0.29.0 (`test_scheduler_outputs`: 8 tests)
and, all tests, with 0.32.0; 0.26.0 starts none beside this torch.
In 0.26.0 and 0.33.0 every name imported or overridden here was looked up.

- 0.26 to 0.28 raise ValueError subclasses for a caller's mistake; from 0.29 on there is
  `VLLMClientError`, which is not a ValueError.
- In 0.26 (no longer in 0.29) output of a step in flight when its request was preempted belongs to nobody;
  later releases deliver it, and `_preempt_request` takes one more argument, which is passed on. Who is
  preempted outside `schedule()` must therefore not start again in the same step; our scheduler never
  offers it then, in any release.
- In 0.26 to 0.30 requests that a step skipped wait in `skipped_waiting`, from 0.32 on in
  `kv_holding_waiting` or in `waiting` with a mark; vLLM alone moves them, so nothing here asks which.
- Up to 0.32 a step admits and runs nobody after a running request that had to preempt itself; 0.33 goes
  on with the next. Our plan frees the blocks before, so it happens only where memory runs short after all.
- 0.31 brought `max_num_active_seqs`: fewer may run than the model runner has slots for (`max_running_requests`).
- Ready-made token prompts (`tokens_input`), `Parser.parse_delta`, `SchedulerStats`, and the
  constructor of `AsyncLLM` as used here are the same in all.
"""

from typing import Any

import vllm
import vllm.exceptions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

OLDEST = (0, 26)
FIRST_UNSUPPORTED = (0, 34)

__all__ = ["CLIENT_ERRORS", "EngineDeadError", "EngineGenerateError", "check_release", "max_running_requests"]

CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
)


def check_release() -> None:
    """Raises RuntimeError for a vLLM that nobody has tried this backend with."""
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not OLDEST <= found < FIRST_UNSUPPORTED:
        raise RuntimeError(
            f"vllm {vllm.__version__}: supported are 0.26 up to 0.33; "
            "install one of them, for example by the 'vllm' extra"
        )


def max_running_requests(scheduler_config: Any) -> int:
    """Requests that may run at once."""
    fewer: int | None = getattr(scheduler_config, "max_num_active_seqs", None)
    most: int = scheduler_config.max_num_seqs
    return most if fewer is None else fewer
