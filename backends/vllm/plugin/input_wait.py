"""Waits for the next engine message or a timeout, while a decode step is delayed.

EngineCore reads messages only between steps, so a delayed step must not keep a new request waiting.
"""

import time
from collections.abc import Callable
from queue import Queue
from typing import Any

from controlplane.core.clock import Duration, to_seconds

_POLL_SECONDS = 0.0005


def wait_for_input(
    inputs: "Queue[Any] | None", longest: Duration, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Blocks until `inputs` is not empty or `is_over` returns True, for at most `longest`.

    `inputs` is None for an engine without an input queue, which is stepped in its caller's process. `is_over`
    reads shared memory, of which no change is announced, so it is asked twice a millisecond.
    """
    end = time.monotonic() + to_seconds(longest)
    while not is_over() and (left := end - time.monotonic()) > 0:
        wait = min(left, _POLL_SECONDS)
        if inputs is None:
            time.sleep(wait)
            continue
        with inputs.not_empty:
            if inputs.not_empty.wait_for(lambda: bool(inputs.queue), wait):
                return
