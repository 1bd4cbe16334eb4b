"""Who goes first? A rank is a tuple, smallest first, ending in the request id: ties never depend on hashing.

A unit of priority is a head start in time, not a class of its own, so no class starves: a request
waits for a higher class only while that class arrived within the head start after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.core.clock import Duration, Instant, after, scaled
from controlplane.core.memory import Footprint
from controlplane.core.request import Request
from controlplane.core.view import Pace

Rank = tuple[int, int, str]


class Ordering(Protocol):
    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank: ...


@dataclass(frozen=True, slots=True)
class OrderingOptions:
    """`patience` stands in for the deadline of a request that states none."""

    priority_head_start: Duration
    patience: Duration
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Fcfs:
    """Keys: arrival less head start, arrival, id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        return (request.arrival - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """Keys: first-token deadline less head start, arrival, id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        deadline = _deadline(request, self.options)
        return (deadline - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Keys: latest start that still meets the deadline, less head start; arrival; id.

    Slack shrinks equally for all that wait, so the latest start orders like slack and never changes.
    """

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        deadline = _deadline(request, self.options)
        latest = deadline - work_before_deadline(request, footprint, pace)
        return (latest - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class ShortestAnswer:
    """Keys: predicted output tokens to come, arrival, id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        return (footprint.steps, request.arrival, request.id)


def work_before_deadline(request: Request, footprint: Footprint, pace: Pace | None) -> Duration:
    """Predicted work inside the deadline: the prefill, or the whole answer if only e2e is promised."""
    if pace is None:
        return Duration(0)
    prefill = scaled(pace.per_prompt_token, request.prompt_tokens)
    is_whole_answer = request.slo.ttft is None and request.slo.e2e is not None
    steps = footprint.steps if is_whole_answer and footprint.per_step else 1
    return Duration(prefill + scaled(pace.step, steps))


def _deadline(request: Request, options: OrderingOptions) -> Instant:
    stated = request.slo.first_token_deadline(request.arrival)
    return after(request.arrival, options.patience) if stated is None else stated


def _head_start(request: Request, options: OrderingOptions) -> Duration:
    return scaled(options.priority_head_start, request.service_class.priority)
