"""Orderings of the waiting queue: FCFS, earliest deadline first, least slack, shortest output.

A rank is a tuple, smallest first, that ends in the request id, so that ties never depend on hashing. A unit
of priority is a head start in time, not a separate class, so no class starves: a request waits only for
requests of a higher class that arrived within the head start after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from controlplane.core.clock import Duration, Instant, after, scaled
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace
from controlplane.core.request import Request

Rank = tuple[int, int, str]


class Ordering(Protocol):
    """Ranks a request once, when it starts to wait; a rank must not depend on the current time."""

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        """Sort key, smallest first, ending in the request id; `pace` is None before any step was observed."""
        ...


@dataclass(frozen=True, slots=True)
class OrderingOptions:
    """Parameters that every ordering gets.

    `priority_head_start` is the head start per unit of priority. `default_deadline` is for requests
    without a deadline. `extra` holds the settings of a plug-in, as the configuration file states them.
    """

    priority_head_start: Duration
    default_deadline: Duration
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served: arrival less head start, arrival, request id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        """Ranks by arrival less head start."""
        return (request.arrival - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """Earliest deadline first: first-token deadline less head start, arrival, request id."""

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        """Ranks by first-token deadline less head start."""
        deadline = _deadline(request, self.options)
        return (deadline - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Least slack first: latest start that meets the deadline less head start, arrival, request id.

    Slack shrinks equally for all waiting requests, so the latest start orders like slack and is constant.
    """

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        """Ranks by latest start less head start."""
        deadline = _deadline(request, self.options)
        latest = deadline - work_before_deadline(request, footprint, pace)
        return (latest - _head_start(request, self.options), request.arrival, request.id)


@dataclass(frozen=True, slots=True)
class ShortestOutput:
    """Shortest predicted output first: predicted output tokens to come, arrival, request id.

    A published baseline: it knows neither priorities nor weights of classes.
    """

    options: OrderingOptions

    def rank(self, request: Request, footprint: Footprint, pace: Pace | None) -> Rank:
        """Ranks by predicted output tokens."""
        return (footprint.steps, request.arrival, request.id)


def work_before_deadline(request: Request, footprint: Footprint, pace: Pace | None) -> Duration:
    """Predicted work before the deadline: the prefill, or the whole response if only e2e is stated."""
    if pace is None:
        return Duration(0)
    prefill = scaled(pace.per_prompt_token, request.prefill_tokens)
    is_whole_answer = request.slo.ttft is None and request.slo.e2e is not None
    steps = footprint.steps if is_whole_answer and footprint.per_step else 1
    return Duration(prefill + scaled(pace.step, steps))


def _deadline(request: Request, options: OrderingOptions) -> Instant:
    stated = request.first_deadline
    return after(request.arrival, options.default_deadline) if stated is None else stated


def _head_start(request: Request, options: OrderingOptions) -> Duration:
    return scaled(options.priority_head_start, request.service_class.priority)
