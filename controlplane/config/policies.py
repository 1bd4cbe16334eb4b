"""By which rules is decided who runs, who waits and who is turned away?"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Count, Milliseconds, MillisecondsFromZero


@section(frozen=True, config=STRICT)
class AdmissionSection:
    """`engine_queue` requests beyond the engine's own limit are sent ahead. With vLLM's own scheduler (64
    unless said) so that those that finish are replaced in the engine's next step; they wait there in the
    gate's order, but can no longer be rejected. With `scheduling.engine` (1,000) because it is the engine
    that holds them. `tpot_guard` lets one more answer start only if those under way keep their promised time
    per token."""

    policy: str = "look-ahead"
    length_predictor: Literal["learned", "history", "max-tokens"] = "learned"
    overflow_probability: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_waiting: Count = 1_000
    max_wait_ms: Milliseconds = 60_000
    defer_threshold_ms: MillisecondsFromZero = 0
    tpot_guard: bool = True
    engine_queue: Count | None = None
    victim_tau_ms: Milliseconds = 100
    victim_almost_done_steps: Count = 8
    victim_thrash_penalty: Annotated[float, Field(ge=0, le=1_000)] = 1.0


def _switched(value: object) -> object:
    """YAML reads a plain `off` as false."""
    if value is None or value is False or value == "off":
        return None
    if not isinstance(value, Mapping):
        raise ValueError("`off`, or a mapping of what differs in the engine; {} for nothing")
    return value


@section(frozen=True, config=STRICT)
class SchedulingSection:
    """`engine` holds what differs from this section and `admission` inside the engine, in the names of
    `EngineOptions`; None leaves vLLM's own scheduler in the gate's order."""

    ordering: str = "edf"
    priority_head_start_ms: MillisecondsFromZero = 1_000
    default_deadline_ms: Milliseconds = 10_000
    engine: Annotated[Mapping[str, Any] | None, BeforeValidator(_switched)] = None
