"""Who wakes a scheduler that is in no hurry? The engine's own input, or the time it was given.

EngineCore reads its messages between steps, so a step that begins later must not keep a newcomer waiting.
"""

import time
from queue import Queue
from typing import Any

from controlplane.core.clock import Duration, to_seconds


def wait_for_input(inputs: "Queue[Any] | None", longest: Duration) -> None:
    """Returns at once when something is there already. `inputs` is None for an engine that is called rather
    than told: nothing arrives there meanwhile."""
    if inputs is None:
        time.sleep(to_seconds(longest))
        return
    with inputs.not_empty:
        inputs.not_empty.wait_for(lambda: bool(inputs.queue), to_seconds(longest))
