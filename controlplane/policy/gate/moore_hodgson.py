"""Which calls give way, so that as many as can be are in time? Computed one after another, by deadline.

Rule (Moore 1968, Management Science 15, with classes): along the order of deadlines the work adds up at one
rate; where a call would end after its deadline, the largest so far gives way. Higher classes are asked first,
and lower ones get the time that those leave. Who may not be turned away keeps its place; if it is late
without the others, nobody gives way for it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from controlplane.core.clock import Instant
from controlplane.core.request import Request
from controlplane.core.view import Share


@dataclass(frozen=True, slots=True, order=True)
class DeadlineJob:
    """`tokens` are those still to be computed. `standing` is the class's priority, None for one that may not
    be turned away. Of calls alike the one that came last gives way."""

    deadline: Instant
    arrival: int
    name: str
    tokens: float
    standing: int | None = 0

    def ends_in_time(self, start: float, per_token: float) -> bool:
        return start + per_token * self.tokens <= self.deadline


def job_of(request: Request, tokens: float) -> DeadlineJob | None:
    """None for a call that was promised nothing: it is computed last."""
    deadline = request.slo.first_token_deadline(request.arrival)
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
    """Work that a serial owner holds and does before this request."""
    deadline = request.slo.first_token_deadline(request.arrival)
    return sum(
        tokens for held, tokens in share.calls if held.model == request.model and _is_first(held, deadline)
    )


def _is_first(held: Request, deadline: Instant | None) -> bool:
    own = held.slo.first_token_deadline(held.arrival)
    return deadline is None or (own is not None and own <= deadline)


def late_jobs(jobs: Iterable[DeadlineJob], start: float, per_token: float) -> set[str]:
    """Their names. Work begins at `begin` and takes `per_token` nanoseconds a token."""
    levels: defaultdict[int | None, list[DeadlineJob]] = defaultdict(list)
    for job in jobs:
        levels[job.standing].append(job)
    kept = _in_time(levels.pop(None, []), start, per_token)
    late = set[str]()
    for _, level in sorted(levels.items(), reverse=True):
        late |= _making_room(level, kept, start, per_token)
        kept += [job for job in level if job.name not in late]
    return late


def _in_time(fixed: list[DeadlineJob], start: float, per_token: float) -> list[DeadlineJob]:
    """An embedder puts the others behind all that can be."""
    kept = []
    for job in sorted(fixed):
        if job.ends_in_time(start, per_token):
            start += per_token * job.tokens
            kept.append(job)
    return kept


def _making_room(
    level: list[DeadlineJob], kept: list[DeadlineJob], start: float, per_token: float
) -> set[str]:
    """Of the level; the kept ones are in time if none of it stays."""
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
