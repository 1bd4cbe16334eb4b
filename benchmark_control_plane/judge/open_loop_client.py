"""Load generator: sends a plan of requests open loop, or closed loop with a number of clients.

Open loop, each request is sent at its planned time, independently of all others. Latencies count from that
time, so a delay in the client shows in every latency and in the send delay. A request that follows another
one is due when the response of that one is complete. A stage of a workflow is judged from the start of its
first stage, and no stage is sent after the deadline. After the last request is sent, unfinished requests have
the drain time and are then cut off.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Called with the number of finished requests and of all requests."""

_NO_OBJECTIVE = SloTargets()
_LOST_BEFORE = (Outcome.REJECTED, Outcome.EVICTED, Outcome.ABORTED, Outcome.FAILED)


class Target(Protocol):
    """A system under test."""

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None:
        """Sends a request and fills `answer` as the response arrives; an error becomes its loss."""


@dataclass(slots=True)
class RunResult:
    """Records of a run, and the send delay in seconds of every request that was due, whether sent or not."""

    records: list[RequestRecord] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """State of a run; `followers` holds by request id the requests to send after it."""

    target: Target
    objectives: Mapping[str, SloTargets]
    clock: Clock
    origin: float
    on_end: Callable[[], None]
    followers: Mapping[str, Sequence[PlannedRequest]]
    in_flight: dict[str, tuple[PlannedRequest, float, PartialResponse, float]] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)

    async def send_and_record(
        self, planned: PlannedRequest, scheduled: float, began: float | None = None
    ) -> None:
        """Sends a request, records its outcome, and then sends its followers, or records them as lost.

        `began` is when the first stage of its workflow was due; None: this is the first.
        """
        answer, began = PartialResponse(), scheduled if began is None else began
        if planned.stage is not None:
            elapsed_ms = 1e3 * (scheduled - began)
            if elapsed_ms >= planned.stage.deadline_ms:
                answer.loss, answer.error = Outcome.LATE, "the deadline of the workflow has passed"
                self.close(planned, scheduled, answer, began)
                self._lose_followers(planned, answer, began)
                return
            planned = replace(planned, e2e_ms=planned.stage.stated_ms(elapsed_ms))
        self.in_flight[planned.id] = (planned, scheduled, answer, began)
        await self.target.send(planned, answer)
        self.close(planned, scheduled, answer, began)
        if answer.loss in _LOST_BEFORE:
            self._lose_followers(planned, answer, began)
            return
        for follower in self.followers.get(planned.id, ()):
            await self.send_and_record(follower, self.clock(), began)

    def _lose_followers(self, planned: PlannedRequest, answer: PartialResponse, began: float) -> None:
        for follower in self.followers.get(planned.id, ()):
            lost = PartialResponse(
                loss=answer.loss, error=f"{planned.id}, which this request follows, was lost"
            )
            self.close(follower, self.clock(), lost, began)
            self._lose_followers(follower, lost, began)

    def close(self, planned: PlannedRequest, scheduled: float, answer: PartialResponse, began: float) -> None:
        self.in_flight.pop(planned.id, None)
        start, objective = self.terms(planned, scheduled, began)
        self.add_record(judge_response(planned, start, answer, self.origin, objective))
        if answer.sent is not None:
            self.result.lateness.append(max(0.0, answer.sent - scheduled))

    def add_record(self, record: RequestRecord) -> None:
        self.result.records.append(record)
        self.on_end()

    def terms(self, planned: PlannedRequest, scheduled: float, began: float) -> tuple[float, SloTargets]:
        """When the time of a request starts, and its objectives."""
        if planned.stage is not None:
            return began, SloTargets(e2e_ms=planned.stage.deadline_ms)
        return scheduled, self.objectives.get(planned.service_class, _NO_OBJECTIVE)

    def cut_off(self) -> None:
        """Records all requests in flight, and their followers, as unfinished."""
        now = self.clock()
        for planned, scheduled, answer, began in list(self.in_flight.values()):
            # A request that found no connection is delayed more than any that did.
            sent = now if answer.sent is None else answer.sent
            self.result.lateness.append(max(0.0, sent - scheduled))
            self._cut_off(planned, scheduled, answer, began, now)
        self.in_flight.clear()

    def _cut_off(
        self, planned: PlannedRequest, scheduled: float, answer: PartialResponse, began: float, now: float
    ) -> None:
        start, objective = self.terms(planned, scheduled, began)
        self.add_record(judge_unfinished(planned, start, answer, self.origin, now, objective))
        for follower in self.followers.get(planned.id, ()):
            self._cut_off(follower, now, PartialResponse(), began if follower.stage else now, now)


async def open_loop(
    target: Target,
    plan: Sequence[PlannedRequest],
    objectives: Mapping[str, SloTargets],
    *,
    warmup: float,
    drain: float,
    clock: Clock,
    tick: Tick = lambda answered, planned: None,
) -> RunResult:
    """Runs a plan open loop.

    Args:
        target: system under test.
        plan: requests in order of time.
        objectives: objectives by class.
        warmup: seconds from the start of the run to the start of the measured window.
        drain: seconds after the last request is sent.
        clock: clock in seconds.
        tick: progress callback.

    Returns:
        Records in the order in which the requests finished.
    """
    followers_of: dict[str, list[PlannedRequest]] = {}
    for planned in plan:
        if planned.after is not None:
            followers_of.setdefault(planned.after, []).append(planned)
    run = _Run(
        target, objectives, clock, clock() + warmup,
        on_end=lambda: tick(len(run.result.records), len(plan)), followers=followers_of,
    )  # fmt: skip
    tasks: set[asyncio.Task[None]] = set()
    try:
        for planned in plan:
            if planned.after is not None:
                continue
            due = run.origin + planned.at
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            tasks.add(asyncio.create_task(run.send_and_record(planned, due)))
        if tasks:
            await asyncio.wait(tasks, timeout=drain)
        run.cut_off()
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return run.result


async def closed_loop(
    target: Target,
    plan: Sequence[PlannedRequest],
    *,
    clients: int,
    seconds: float,
    clock: Clock,
) -> RunResult:
    """Runs a plan closed loop: each of `clients` sends its next request when the previous one is finished.

    No request is sent after `seconds`. Latencies count from the actual send time.
    """
    start = clock()
    run = _Run(target, {}, clock, start, lambda: None, {})
    waiting: Iterator[PlannedRequest] = iter(plan)

    async def client() -> None:
        for planned in waiting:
            if clock() - start > seconds:
                return
            await run.send_and_record(planned, clock())

    await asyncio.gather(*(client() for _ in range(clients)))
    return run.result
