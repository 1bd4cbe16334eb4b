"""Which vLLM is this? Every difference between the supported releases that we meet, in one place.

Supported: 0.26 up to, but without, 0.34. Importing this module imports vLLM, which takes seconds.

- 0.26 to 0.28 raise ValueError subclasses for a caller's mistake; from 0.29 on there is
  `VLLMClientError`, which is not a ValueError.
- In 0.26 (no longer in 0.29) output of a step in flight when its request was preempted belongs to nobody;
  later releases deliver it. Who is preempted outside `schedule()` must therefore not start again in the
  same step; our scheduler never offers it then, in any release.
- In 0.26 to 0.30 requests that a step skipped wait in `skipped_waiting`, in 0.32 in `kv_holding_waiting`
  or in `waiting` with a mark; vLLM alone moves them, so nothing here asks which.
- Ready-made token prompts (`tokens_input`), `Parser.parse_delta`, `SchedulerStats`, and the
  constructor of `AsyncLLM` as used here are the same in 0.26, 0.29 and 0.32.
"""

import vllm
import vllm.exceptions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

OLDEST = (0, 26)
FIRST_UNKNOWN = (0, 34)

__all__ = ["CALLER_MISTAKES", "EngineDeadError", "EngineGenerateError", "check_release"]

CALLER_MISTAKES: tuple[type[Exception], ...] = (
    ValueError,
    getattr(vllm.exceptions, "VLLMClientError", ValueError),
)


def check_release() -> None:
    """Raises RuntimeError for a vLLM that nobody has tried this backend with."""
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not OLDEST <= found < FIRST_UNKNOWN:
        raise RuntimeError(
            f"vllm {vllm.__version__}: supported are 0.26 up to 0.33; "
            "install one of them, for example by the 'vllm' extra"
        )
