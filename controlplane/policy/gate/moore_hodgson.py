"""Selects the jobs to reject so that as many others as possible meet their deadlines on one serial server.

Moore and Hodgson (Moore 1968, Management Science 15), extended by priority classes. Jobs are added in order
of their deadlines at one processing rate; whenever a job would end after its deadline, the largest job so far
is removed. Higher classes are placed first, lower ones use the time that is left. A job that must not be
rejected keeps its place; if it is late even without the others, no job is removed for it.
"""

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from controlplane.core.clock import Instant
from controlplane.core.pool_view import Share
from controlplane.core.request import Request


class DeadlineJob(NamedTuple):
    """One embedding call with a deadline.

    `tokens` are those still to be computed. `priority` is the priority of its class, None for a job that must
    not be rejected. Among equal jobs the one that arrived last is removed.
    """

    deadline: Instant
    arrival: int
    name: str
    tokens: float
    priority: int | None = 0

    def ends_in_time(self, start: float, per_token: float) -> bool:
        """Whether the job meets its deadline if it starts at `start` (ns) with `per_token` ns per token."""
        return start + per_token * self.tokens <= self.deadline

    def is_lost(self, start: float, per_token: float) -> bool:
        """Whether the job may be rejected and misses its deadline; arguments as of `ends_in_time`."""
        return self.priority is not None and not self.ends_in_time(start, per_token)


def job_of(request: Request, tokens: float) -> DeadlineJob | None:
    """The job of `request`; None for a request without a deadline, which is computed last."""
    deadline = request.first_deadline
    if deadline is None:
        return None
    service_class = request.service_class
    return DeadlineJob(
        deadline,
        request.arrival,
        request.id,
        tokens,
        service_class.priority if service_class.sheddable else None,
    )


def tokens_before(share: Share, request: Request) -> float:
    """Tokens of the calls in flight that a serial owner computes before `request`."""
    deadline = request.first_deadline
    return sum(
        tokens for held, tokens in share.calls if held.model == request.model and _is_first(held, deadline)
    )


def _is_first(held: Request, deadline: Instant | None) -> bool:
    """Whether a call in flight is computed before one with this deadline."""
    own = held.first_deadline
    return deadline is None or (own is not None and own <= deadline)


def late_jobs(jobs: Iterable[DeadlineJob], start: float, per_token: float) -> set[str]:
    """Names of the jobs to reject.

    Args:
        jobs: the jobs to schedule.
        start: start of the first job, in ns.
        per_token: processing time per token, in ns.
    """
    levels: defaultdict[int | None, list[DeadlineJob]] = defaultdict(list)
    for job in jobs:
        levels[job.priority].append(job)
    kept = _in_time(levels.pop(None, []), start, per_token)
    late = set[str]()
    for _, level in sorted(levels.items(), reverse=True):
        late |= _making_room(level, kept, start, per_token)
        kept += [job for job in level if job.name not in late]
    return late


def _in_time(fixed: list[DeadlineJob], start: float, per_token: float) -> list[DeadlineJob]:
    """The protected jobs that meet their deadlines; the embedder computes the others after all that can."""
    kept = []
    for job in sorted(fixed):
        if job.ends_in_time(start, per_token):
            start += per_token * job.tokens
            kept.append(job)
    return kept


def _making_room(
    level: list[DeadlineJob], kept: list[DeadlineJob], start: float, per_token: float
) -> set[str]:
    """Names of the jobs of `level` to remove so that the rest and all of `kept` meet their deadlines."""
    late, largest, end = set[str](), list[tuple[float, int, str]](), start
    level_names = {job.name for job in level}
    for job in sorted([*kept, *level]):
        end += per_token * job.tokens
        if job.name in level_names:
            heappush(largest, (-job.tokens, -job.arrival, job.name))
        while end > job.deadline and largest:
            tokens, _, name = heappop(largest)
            end += per_token * tokens
            late.add(name)
    return late
