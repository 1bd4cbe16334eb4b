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
    max_waiting: Count = 1_000
    """Waiting requests per owner (LLM, embeddings); above it new requests are rejected with Retry-After."""
    max_wait_ms: Milliseconds = 60_000
    """A request that was never admitted is rejected after this time, also if its class is not sheddable. One
    that was sent ahead to an engine with Tandem's policy, and that the engine has not started, is evicted."""
    defer_threshold_ms: MillisecondsFromZero = 0
    """A sheddable request with less time than this until its latest start is rejected instead of deferred."""
    tpot_guard: bool = True
    """Start another request only if running requests still meet their TPOT; false: if memory allows it."""
    explore: Annotated[float, Field(ge=0, le=0.1)] = 0.0
    """Share of the generation requests to be rejected as `slo_unattainable` that are served all the same.
    Their outcomes, `tandem_explored_total`, show how many rejections were right. Not with
    `scheduling.engine: off`."""
    engine_queue: Count | None = None
    """Requests sent ahead to the engine beyond its free slots, so that it fills a slot in its next step.
    They can no longer be rejected. Default 1000, since the engine orders them; 64 with
    `scheduling.engine: off`."""


def _switched(value: object) -> object:
    """Maps `off`, which YAML reads as false, to None, and a key without a value to the defaults."""
    if value is False or value == "off":
        return None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("should be `off`, or a mapping of the options that differ; {} if none differ")
    return value


@section(frozen=True, config=STRICT)
class SchedulingSection:
    """Order of waiting requests, in the gate and in the engine."""

    ordering: str | None = None
    """Order of the gate's waiting queues, and of the engine unless `engine.ordering` is stated: `fcfs`, `edf`
    (earliest deadline first) or `least-slack`. null: `edf` at the gate and `srmt` in the engine."""
    priority_head_start_ms: MillisecondsFromZero = 1_000
    """Each unit of priority ranks a request as if it had arrived, or were due, this much earlier."""
    default_deadline_ms: Milliseconds = 10_000
    """Deadline for ordering of a request without an objective, counted from its arrival."""
    victims: str = "latest-started"
    """Which running requests of one priority are preempted first; a name of the slot `victims`. Lower
    priorities are preempted before."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a plug-in ordering, passed to it as they are; the built-in orderings take none."""
    engine: Annotated[Mapping[str, Any] | None, BeforeValidator(_switched)] = field(default_factory=dict)
    """Options of Tandem's engine policy inside vLLM (see below); one that is not named has the value of the
    same key here or in `admission`. `off`: vLLM's own scheduler in the gate's order, with static quotas."""

    @property
    def gate_ordering(self) -> str:
        """Name of the order of the gate's waiting queues."""
        return self.ordering or "edf"
