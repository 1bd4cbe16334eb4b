"""By which rules is decided who runs, who waits and who is turned away?"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds


@section(frozen=True, config=STRICT)
class AdmissionSection:
    """`engine_queue` requests beyond the engine's own limit are sent ahead, so that those that finish
    are replaced in the engine's next step; there they wait in the gate's order, but can no longer be
    rejected."""

    policy: str = "look-ahead"
    lengths: Literal["history", "max-tokens"] = "history"
    overflow_probability: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_waiting: Annotated[int, Field(ge=0)] = 1_000
    max_wait_ms: Milliseconds = 60_000
    defer_threshold_ms: Annotated[float, Field(ge=0)] = 0
    engine_queue: Annotated[int, Field(ge=0)] = 64
    victim_tau_ms: Milliseconds = 100
    victim_almost_done_steps: Annotated[int, Field(ge=0)] = 8
    victim_thrash_penalty: Annotated[float, Field(ge=0)] = 1.0


@section(frozen=True, config=STRICT)
class SchedulingSection:
    ordering: str = "edf"
    priority_head_start_ms: Annotated[float, Field(ge=0)] = 1_000
    patience_ms: Milliseconds = 10_000
