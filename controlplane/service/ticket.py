"""The mutable state of one request, from its arrival at the gate to its one outcome."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from controlplane.core.clock import NO_TIME, Duration, Instant, between, scaled, to_milliseconds
from controlplane.core.deadlines import last_chance, next_token_deadline
from controlplane.core.decision import Outcome, Reject
from controlplane.core.forecast import LengthForecast
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.memory_ledger import Footprint, Lease, generate_footprint
from controlplane.core.pool_view import Pace, Running, Waiting
from controlplane.core.ports import Embedder
from controlplane.core.request import Phase, Request, Timeline, moved
from controlplane.service.decision_history import Decided, Preempted
from controlplane.service.request_trace import RequestTrace
from predictors.timing.ttft_model import TtftForecast, WorkAhead


class Rejected(Exception):
    """The gate rejected a request, or evicted it after it had accepted it (`is_evicted`).

    `reject` holds the reason and the Retry-After.
    """

    def __init__(self, request: Request, reject: Reject, *, is_evicted: bool = False) -> None:
        super().__init__(f"{request.id}: {'evicted' if is_evicted else 'rejected'}, {reject.reason}")
        self.request = request
        self.reject = reject
        self.is_evicted = is_evicted


class DecisionFailed(Exception):
    """The gate could not decide a request because of a defect in its own code or in a policy; see the log."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Time of dispatch to the engine, with the work ahead, the pace and the TTFT forecast at that time."""

    at: Instant
    ahead: WorkAhead
    pace: Pace
    forecast: TtftForecast


@dataclass(eq=False, slots=True)
class Ticket:
    """The state of one request; written by the dispatcher and by the stream of its tokens."""

    request: Request
    footprint: Footprint
    forecast: LengthForecast | None
    timeline: Timeline
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    entry: Waiting | None = None
    """Its last entry in the waiting queue."""
    phase: Phase = Phase.QUEUED
    lease: Lease | None = None
    decision: str = "ADMIT"
    predicted_ttft: Duration | None = None
    predicted_ttft_upper: Duration | None = None
    engine_start: EngineStart | None = None
    pending_preemptions: tuple[asyncio.Task[None], ...] = ()
    """Preemptions under way in the engine; the request starts when they are complete."""
    service_time: Duration = NO_TIME
    """Predicted time for which its owner's whole quota would be busy with it."""
    tenant_delay: Duration = NO_TIME
    """How far weighted fair queueing moves it back behind its tenant's other work."""
    preemptions: int = 0
    cache_hit_tokens: int = 0
    """Prompt tokens found in the engine's prefix cache; `Request.cached_tokens` is what was expected."""
    has_lost_blocks: bool = False
    """Whether the engine reports that the started request holds no blocks."""
    prompt_blocks: tuple[int, ...] = ()
    """Hashes of the prompt's blocks, if the engine has a prefix cache."""
    input_lengths: Sequence[int] = ()
    """Tokens of each input of an embedding request."""
    embedder: Embedder | None = None
    """The worker that an embedding request is bound to."""
    shared_bytes: int = 0
    """Bytes that the footprint leaves out, because other requests pay for them."""
    charged_tokens: int | None = None
    """Tokens charged to its tenant's rate limits before it was tokenized; None if nothing was."""
    is_resumable: bool = False
    """Whether it can be preempted and resumed with the same output as without."""
    is_explored: bool = False
    """Whether it was forwarded although it should have been rejected (`admission.explore`)."""
    trace: RequestTrace | None = None
    """The trace of its HTTP request; None: it is not traced."""
    outcome: Outcome | None = None
    history: list[Decided | Preempted] = field(default_factory=list)
    first_forecast: LengthForecast | None = field(init=False)
    """The length forecast at arrival; `forecast` is corrected while tokens arrive."""
    _timeout: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self.first_forecast = self.forecast

    def renew_grant(self) -> None:
        """Replaces the grant, so that the request can be admitted again."""
        self.granted = asyncio.get_running_loop().create_future()

    def reject(self, reject: Reject) -> None:
        """Makes the present or next wait for the grant, and the block of `revocable`, raise Rejected."""
        was_admitted = self.timeline.dispatched is not None
        self.fail(Rejected(self.request, reject, is_evicted=was_admitted))

    def fail(self, error: Exception) -> None:
        """Makes the present or next wait for the grant, and the block of `revocable`, raise `error`."""
        if self.granted.done():
            self.renew_grant()
        self.granted.set_exception(error)
        # Marks the exception as retrieved, since a cancelled caller never retrieves it.
        self.granted.exception()
        if self._timeout is not None:
            self._timeout.reschedule(0)

    @asynccontextmanager
    async def revocable(self) -> AsyncIterator[None]:
        """Cancels the block and raises Rejected if the request is rejected while the block runs.

        The request may have been rejected since its grant, and may be rejected in the iteration of the event
        loop in which the block ends; both raise Rejected too.
        """
        self.raise_if_failed()
        self._timeout = asyncio.timeout(None)
        try:
            async with self._timeout:
                yield
        except Exception:
            self.raise_if_failed()
            raise
        finally:
            self._timeout = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raises the error of `reject` or `fail`; another request may hold its memory already."""
        if self.outcome is not None:
            self.granted.result()

    def move(self, to: Phase) -> None:
        """Enters phase `to`. Raises IllegalTransition if no transition leads there."""
        self.phase = moved(self.phase, to)

    @property
    def engine_rank(self) -> int:
        """Rank in an engine without Tandem's scheduler: the first component of that of its last entry."""
        return 0 if self.entry is None else self.entry.rank[0]

    @property
    def queue_ms(self) -> float:
        """Milliseconds from arrival to the first dispatch; 0 before it."""
        queue = self.timeline.queue
        return 0.0 if queue is None else to_milliseconds(queue)

    @property
    def predicted_ttft_ms(self) -> float | None:
        """The TTFT forecast in milliseconds from arrival; None if there was none."""
        return None if self.predicted_ttft is None else to_milliseconds(self.predicted_ttft)

    def as_running(
        self, now: Instant, pace: Pace | None, *, freed_bytes: int, remaining_steps: int, shared_tokens: int
    ) -> Running:
        """The request as a candidate victim.

        It would recompute its prompt and its output so far, except the `shared_tokens` of other requests.
        """
        done = self.request.prompt_tokens + self.timeline.output_tokens - shared_tokens
        recompute = Duration(0) if pace is None else scaled(pace.per_prompt_token, done)
        slack = self.slack(now, remaining_steps, pace)
        if self.timeline.has_missed(self.request.slo):
            slack = None
        elif slack is not None and slack < 0:
            slack = None if self._cannot_meet_slo(now, pace) else NO_TIME
        return Running(
            request_id=self.request.id,
            priority=self.request.service_class.priority,
            freed_bytes=freed_bytes,
            slack=slack,
            recompute=recompute,
            remaining_steps=remaining_steps,
            preemptions=self.preemptions,
            progress=self.timeline.progress,
        )

    def footprint_to_resume(self, geometry: KvGeometry) -> Footprint:
        """The footprint after a preemption, when its output so far is part of the prompt."""
        request, done = self.request, self.timeline.output_tokens
        left = request.max_output_tokens - done
        forecast = None if self.forecast is None else self.forecast.remaining(after=done)
        return generate_footprint(
            geometry,
            prompt_tokens=request.prompt_tokens + done,
            max_output_tokens=left,
            expected_tokens=left if forecast is None else forecast.mean,
        )

    def slack(self, now: Instant, remaining_steps: int, pace: Pace | None) -> Duration | None:
        """Time to the next token's deadline (`core.deadlines`); None without one."""
        step = NO_TIME if pace is None else pace.step
        seen = self.timeline.progress
        deadline = next_token_deadline(self.request.slo, seen, max(1, remaining_steps), step)
        return None if deadline is None else between(now, deadline)

    def _cannot_meet_slo(self, now: Instant, pace: Pace | None) -> bool:
        slo, seen, limit = self.request.slo, self.timeline.progress, self.request.max_output_tokens
        likely = (0, limit)
        if self.forecast is not None:
            likely = self.forecast.likely_total(seen.output_tokens, limit)
        chance = last_chance(slo, seen, likely, NO_TIME if pace is None else pace.step)
        return chance is not None and now > chance


TICKETS: ContextVar[list[Ticket] | None] = ContextVar("tickets", default=None)
"""Collects the tickets of the gate requests that one HTTP request makes; None: not collected."""
