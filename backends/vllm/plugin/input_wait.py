"""Waits for the next engine message or a timeout, while a decode step is delayed.

EngineCore reads messages only between steps, so a delayed step must not keep a new request waiting.
"""

import time
from queue import Queue
from typing import Any

from controlplane.core.clock import Duration, to_seconds


def wait_for_input(inputs: "Queue[Any] | None", longest: Duration) -> None:
    """Blocks until `inputs` is not empty, for at most `longest`.

    `inputs` is None for an engine without an input queue, which is stepped in its caller's process.
    """
    if inputs is None:
        time.sleep(to_seconds(longest))
        return
    with inputs.not_empty:
        inputs.not_empty.wait_for(lambda: bool(inputs.queue), to_seconds(longest))
