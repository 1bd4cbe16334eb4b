"""How is a plan of requests carried out? Open loop: each is sent at its time, whatever the others do.

Rule: what was planned decides when a request counts from, so an answer that keeps the client or a bound on
its connections back shows as lateness and in every latency. A request that waits for another's answer is
due when that arrives. After the last was sent the rest has the drain's time, then it is given up.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmark_control_plane.judge.records import (
    PartialResponse,
    RequestRecord,
    SloTargets,
    judge_response,
    judge_unfinished,
)
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.decision import Outcome

Clock = Callable[[], float]
"""Seconds."""
Tick = Callable[[int, int], None]
"""(answered, planned)."""

_NO_OBJECTIVE = SloTargets()
_LOST_BEFORE = (Outcome.REJECTED, Outcome.EVICTED, Outcome.ABORTED, Outcome.FAILED)


class Target(Protocol):
    """Where requests go. `send` fills the answer as it comes; whatever goes wrong becomes its loss."""

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None: ...


@dataclass(slots=True)
class RunResult:
    """`lateness` in seconds, of every request that was due, sent or not."""

    records: list[RequestRecord] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    target: Target
    objectives: Mapping[str, SloTargets]
    clock: Clock
    origin: float
    on_end: Callable[[], None]
    followers: Mapping[str, Sequence[PlannedRequest]]
    open: dict[str, tuple[PlannedRequest, float, PartialResponse]] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)

    async def send_and_record(self, planned: PlannedRequest, scheduled: float) -> None:
        answer = PartialResponse()
        self.open[planned.id] = (planned, scheduled, answer)
        await self.target.send(planned, answer)
        self.close(planned, scheduled, answer)
        for next_one in self.followers.get(planned.id, ()):
            if answer.loss in _LOST_BEFORE:
                lost = PartialResponse(loss=answer.loss, error=f"{planned.id} was not answered")
                self.close(next_one, self.clock(), lost)
            else:
                await self.send_and_record(next_one, self.clock())

    def close(self, planned: PlannedRequest, scheduled: float, answer: PartialResponse) -> None:
        self.open.pop(planned.id, None)
        self.add_record(judge_response(planned, scheduled, answer, self.origin, self.objective(planned)))
        if answer.sent is not None:
            self.result.lateness.append(max(0.0, answer.sent - scheduled))

    def add_record(self, record: RequestRecord) -> None:
        self.result.records.append(record)
        self.on_end()

    def objective(self, planned: PlannedRequest) -> SloTargets:
        return self.objectives.get(planned.service_class, _NO_OBJECTIVE)

    def cut_off_open(self) -> None:
        now = self.clock()
        for planned, scheduled, answer in list(self.open.values()):
            # One that never found a connection is later than any that did.
            sent = now if answer.sent is None else answer.sent
            self.result.lateness.append(max(0.0, sent - scheduled))
            self.add_record(
                judge_unfinished(planned, scheduled, answer, self.origin, now, self.objective(planned))
            )
            for next_one in self.followers.get(planned.id, ()):
                never = PartialResponse()
                self.add_record(
                    judge_unfinished(next_one, now, never, self.origin, now, self.objective(next_one))
                )
        self.open.clear()


async def play(
    target: Target,
    plan: Sequence[PlannedRequest],
    objectives: Mapping[str, SloTargets],
    *,
    warmup: float,
    drain: float,
    clock: Clock = time.perf_counter,
    tick: Tick = lambda answered, planned: None,
) -> RunResult:
    """Records in the order in which the requests ended."""
    follow: dict[str, list[PlannedRequest]] = {}
    for one in plan:
        if one.after is not None:
            follow.setdefault(one.after, []).append(one)
    course = _Run(
        target, objectives, clock, clock() + warmup,
        on_end=lambda: tick(len(course.result.records), len(plan)), followers=follow,
    )  # fmt: skip
    tasks: set[asyncio.Task[None]] = set()
    try:
        for one in plan:
            if one.after is not None:
                continue
            due = course.origin + one.at
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            tasks.add(asyncio.create_task(course.send_and_record(one, due)))
        if tasks:
            await asyncio.wait(tasks, timeout=drain)
        course.cut_off_open()
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return course.result


async def closed_loop(
    target: Target,
    plan: Sequence[PlannedRequest],
    *,
    clients: int,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> RunResult:
    """Closed loop: `clients` take the requests one after the other, none new after `seconds`."""
    start = clock()
    course = _Run(target, {}, clock, start, lambda: None, {})
    waiting: Iterator[PlannedRequest] = iter(plan)

    async def client() -> None:
        for one in waiting:
            if clock() - start > seconds:
                return
            await course.send_and_record(one, clock())

    await asyncio.gather(*(client() for _ in range(clients)))
    return course.result
