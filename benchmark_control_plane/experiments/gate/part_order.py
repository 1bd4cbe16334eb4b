"""A gate in virtual time that orders embedding calls by one deadline and refuses them by a later one.

What a stage before the answer states, its *whole*, decides whether it is refused. Its *part*, a share of what
remains of its workflow's deadline, decides its place in the queue, in the passes and in the prediction of
what will be late, and with `is_worth_by_part` what a pass is worth that computes it. The answer has only a
whole.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

from backends.embedding import deadline_order
from backends.simulated import embedder as simulated_embedder
from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import SimulatedTarget
from benchmark_control_plane.judge.workflow_stages import StageName, WorkflowDeadlines, WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.clock import NO_TIME, Duration, Instant, after, between, milliseconds, to_milliseconds
from controlplane.core.pool_view import Share, Waiting
from controlplane.core.ports import Vectors
from controlplane.core.request import Kind, Request
from controlplane.policy.gate import admission
from controlplane.policy.gate.moore_hodgson import DeadlineJob, late_jobs
from controlplane.policy.sharing.pass_size import PendingWork, call_values
from controlplane.service.ticket import Ticket


class PartInstant(int):
    """A part's deadline in ns, which orders, with the `whole` one; less a time it is both times left."""

    whole: int

    @classmethod
    def of(cls, part: int, whole: int) -> "PartInstant":
        """Both deadlines."""
        made = cls(part)
        made.whole = whole
        return made

    def __sub__(self, other: int) -> "PartInstant":
        return PartInstant.of(int(self) - other, self.whole - other)


def whole_of(part: int) -> int:
    """The deadline, or the time left, by which a call is refused."""
    return part.whole if isinstance(part, PartInstant) else part


class PartJob(NamedTuple):
    """A `DeadlineJob` in the order of `part`."""

    part: int
    arrival: int
    name: str
    tokens: float
    priority: int | None
    deadline: Instant

    ends_in_time = DeadlineJob.ends_in_time
    is_lost = DeadlineJob.is_lost


def _late_jobs(jobs: Iterable[Any], start: float, per_token: float) -> set[str]:
    parted: list[Any] = [
        job if isinstance(job, PartJob) else PartJob(*job, Instant(whole_of(job.deadline))) for job in jobs
    ]
    return late_jobs(parted, start, per_token)


def values_by_part(calls: Iterable[PendingWork], until_next: Duration = NO_TIME) -> list[float]:
    """As `call_values`: a call is urgent by its part, and in time by its whole."""
    needed, ahead, found = 0.0, 0, []
    for call in calls:
        ahead += call.work
        whole = None if call.time_left is None else whole_of(call.time_left)
        is_in_time = whole is not None and 0 < whole >= ahead
        if is_in_time and call.time_left is not None:
            needed = max(needed, min(1.0, ahead / max(1, int(call.time_left) - until_next)))
        found.append(call.weight * max(0.01, needed if is_in_time else 0.0))
    return found


def _whole_values(calls: Iterable[PendingWork], until_next: Duration = NO_TIME) -> list[float]:
    plain = (
        call if call.time_left is None else call._replace(time_left=Duration(whole_of(call.time_left)))
        for call in calls
    )
    return call_values(plain, until_next)


def _time_left(key: deadline_order.DeadlineKey, now: Instant) -> Duration | None:
    return None if key.has_no_deadline else Duration(key.deadline - now)


@dataclass(frozen=True, slots=True)
class PartOrder:
    """Shares of the deadline of a workflow by stage, of which each orders its part of what remains."""

    shares: Mapping[StageName, float]
    is_worth_by_part: bool = False


@dataclass(slots=True)
class PartOrderTarget:
    """A simulated target whose gate is told two deadlines of each stage; `parts` has the earlier ones."""

    target: SimulatedTarget
    order: PartOrder
    parts: dict[str, Instant] = field(default_factory=dict)
    began: dict[str, Instant] = field(default_factory=dict)

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None:
        """Sends a request; of a stage before the answer the gate learns its part, too."""
        stage = planned.stage
        if stage is not None and planned.kind is Kind.EMBED and planned.e2e_ms is not None:
            now = self.target.service.gate.clock.now()
            elapsed = between(self.began.setdefault(stage.workflow, now), now)
            plain = WorkflowStage(stage.workflow, stage.name, stage.deadline_ms)
            told = WorkflowDeadlines("carried", self.order.shares).applied(plain)
            part_ms = told.part * (stage.deadline_ms - to_milliseconds(elapsed))
            self.parts[planned.id] = after(now, milliseconds(part_ms))
        await self.target.send(planned, answer)


@contextmanager
def ordered_by_parts(target: SimulatedTarget, order: PartOrder) -> Iterator[PartOrderTarget]:
    """The target with two deadlines of each stage, until the block ends."""
    told = PartOrderTarget(target, order)
    dispatcher = target.service.gate.dispatcher
    (embedder,) = dispatcher.snapshots.encoders.values()
    plain_entry, plain_embed, plain_job = dispatcher.entry_for, embedder.embed, admission.job_of

    def part_of(request: Request) -> Instant | None:
        whole = request.first_deadline
        part = told.parts.get(request.id.rpartition("-")[0], whole)
        return part if part is None or whole is None else min(part, whole)

    def entry_for(ticket: Ticket) -> Waiting:
        entry = plain_entry(ticket)
        part, whole = part_of(entry.request), entry.request.first_deadline
        if part is None or whole is None:
            return entry
        first, arrival, name = entry.rank
        return replace(entry, rank=(first - between(part, whole), arrival, name))

    def job_of(request: Request, tokens: float) -> Any:
        job, part = plain_job(request, tokens), part_of(request)
        if job is None or part is None:
            return job
        return PartJob(part, job.arrival, job.name, tokens, job.priority, job.deadline)

    def tokens_before(share: Share, request: Request) -> float:
        part = part_of(request)
        return sum(
            tokens
            for held, tokens in share.calls
            if held.model == request.model
            and (part is None or ((own := part_of(held)) is not None and own <= part))
        )

    async def embed(request: Request, inputs: Any, *, deadline: Instant | None) -> Vectors:
        part = part_of(request)
        if deadline is not None and part is not None:
            deadline = Instant(PartInstant.of(part, deadline))
        return await plain_embed(request, inputs, deadline=deadline)

    values = values_by_part if order.is_worth_by_part else _whole_values
    with ExitStack() as stack:
        for place, name, new in (
            (dispatcher, "entry_for", entry_for),
            (embedder, "embed", embed),
            (admission, "job_of", job_of),
            (admission, "late_jobs", _late_jobs),
            (admission, "tokens_before", tokens_before),
            (deadline_order, "late_jobs", _late_jobs),
            (simulated_embedder, "call_values", values),
            (simulated_embedder, "time_left", _time_left),
        ):
            stack.enter_context(patch.object(place, name, new))
        yield told
