"""What engines report of themselves: state, steps, the cost of a step, and how they share the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.pool_view import Pace


class EnginePreemption(NamedTuple):
    """A preemption inside the engine: the request that lost its blocks, and the one that starts in its place.

    `beneficiary` is None where running requests needed the blocks. `tokens` were in the blocks and must be
    computed again unless a prefix cache has them.
    """

    at: Instant
    request_id: str
    beneficiary: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """State reported by the engine; memory in bytes of KV blocks.

    Requests start within `quota_bytes` and are preempted beyond `use_ceiling_bytes` (None: no quota is
    enforced). `ceded_bytes` of the cache are neither held nor still being written by the engine: only they
    may be lent.
    `held_bytes` is what each running request holds, by id (None if the engine does not report it); a request
    not listed waits in the engine. `recompute_tokens` were preempted from the cache since the start and must
    be computed again unless a prefix cache has them; None if unknown. `preempted` are the last preemptions of
    Tandem's scheduler, the oldest first. `waited` is the time since the start that the engine left to other
    work on purpose.
    """

    used_bytes: int
    total_bytes: int
    running: int
    waiting: int
    preemptions: int
    quota_bytes: int | None = None
    use_ceiling_bytes: int | None = None
    ceded_bytes: int = 0
    held_bytes: Mapping[str, int] | None = None
    pace: Pace | None = None
    recompute_tokens: int | None = None
    preempted: tuple[EnginePreemption, ...] = ()
    waited: Duration = NO_TIME


class EngineStep(NamedTuple):
    """Work of one engine step, and the time since the previous step.

    `waited` is the part of that time that decode pacing left to other work.
    """

    prefill_tokens: int
    decodes: int
    cells: int
    took: Duration
    waited: Duration = NO_TIME


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per step, and in addition per decoding sequence, KV cell and prompt token."""

    step: float
    decode: float
    cell: float
    prompt_token: float


class DeviceSharing(StrEnum):
    """How embedding passes share the device with the steps of the LLM.

    `TURNS`: one after the other, as simulated by default. `BESIDE`: at the same time. `IDLE`: at the same
    time, and in the operating system's idle class while a generation runs, so that they start at once.
    """

    TURNS = "turns"
    BESIDE = "beside"
    IDLE = "idle"
