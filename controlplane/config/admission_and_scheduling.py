"""Sections `admission` and `scheduling`: which request is admitted, in which order, and what is preempted."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Count, Milliseconds, MillisecondsFromZero


@section(frozen=True, config=STRICT)
class AdmissionSection:
    """Decisions of the gate: admit, defer, preempt or reject."""

    policy: str = "look-ahead"
    """`look-ahead` admits a request if the predicted memory of all running requests leaves room for it
    until its end; `fits-now` considers only the memory in use."""
    length_predictor: str = "learned"
    """Source of output lengths: `learned` from prompts and finished requests, `history` from finished
    requests only, `max-tokens` assumes that every request reaches its limit; or the name of a plug-in of the
    slot `length_predictor`."""
    overflow_probability: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Accepted probability that predicted lengths are too short together, so that the engine preempts."""
    max_waiting: Count = 1_000
    """Waiting requests per owner (LLM, embeddings); above it new requests are rejected with Retry-After."""
    max_wait_ms: Milliseconds = 60_000
    """A request that was never admitted is rejected after this time, also if its class is not sheddable."""
    defer_threshold_ms: MillisecondsFromZero = 0
    """A sheddable request with less time than this until its latest start is rejected instead of deferred."""
    tpot_guard: bool = True
    """Start another request only if running requests still meet their TPOT; false: if memory allows it."""
    engine_queue: Count | None = None
    """Requests sent ahead to the engine beyond its free slots, so that it fills a slot in its next step.
    They can no longer be rejected. Default 64; 1000 with `scheduling.engine`, which orders them itself."""
    victim_tau_ms: Milliseconds = 100
    """Slack at which the urgency term of a preemption victim's cost has fallen to one half."""
    victim_almost_done_steps: Count = 8
    """Do not preempt a request with at most this many predicted output tokens left."""
    victim_thrash_penalty: Annotated[float, Field(ge=0, le=1_000)] = 1.0
    """Each earlier preemption of a request adds this factor to its cost as a victim; 0 disables it."""


def _switched(value: object) -> object:
    """Maps `off`, which YAML reads as false, to None."""
    if value is None or value is False or value == "off":
        return None
    if not isinstance(value, Mapping):
        raise ValueError("should be `off`, or a mapping of the options that differ; {} if none differ")
    return value


@section(frozen=True, config=STRICT)
class SchedulingSection:
    """Order of waiting requests, in the gate and in the engine."""

    ordering: str = "edf"
    """Order of the waiting queues: `fcfs`, `edf` (earliest deadline first) or `least-slack`."""
    priority_head_start_ms: MillisecondsFromZero = 1_000
    """Each unit of priority ranks a request as if it had arrived, or were due, this much earlier."""
    default_deadline_ms: Milliseconds = 10_000
    """Deadline for ordering of a request without an objective, counted from its arrival."""
    victims: str = "cheapest-sufficient"
    """How to choose the requests to preempt for an urgent one; a name of the slot `victims`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a plug-in ordering, passed to it as they are; the built-in orderings take none."""
    engine: Annotated[Mapping[str, Any] | None, BeforeValidator(_switched)] = None
    """`off`: vLLM's own scheduler, in the gate's order. A mapping (see below) runs Tandem's engine policy
    inside vLLM; an option that is not named has the value of the same key here or in `admission`."""
