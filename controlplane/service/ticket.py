"""Where does one request stand? Its phase, stamps and lease, from the gate to its one outcome."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from controlplane.core.clock import Duration, Instant, between, scaled, to_milliseconds
from controlplane.core.decision import Outcome, Reject
from controlplane.core.forecast import LengthForecast
from controlplane.core.geometry import KvGeometry
from controlplane.core.memory import Footprint, Lease, generate_footprint
from controlplane.core.request import Phase, Request, Timeline, moved
from controlplane.core.view import Pace, Running, Waiting
from predictors.timing.ttft import Ahead, TtftForecast

_ZERO = Duration(0)


class Rejected(Exception):
    """The gate said no. `reject` says why and when to come back; `is_evicted` that it had said yes before."""

    def __init__(self, request: Request, reject: Reject, *, is_evicted: bool = False) -> None:
        super().__init__(f"{request.id}: {'evicted' if is_evicted else 'rejected'}, {reject.reason}")
        self.request = request
        self.reject = reject
        self.is_evicted = is_evicted


class DecisionFailed(Exception):
    """A defect of ours kept the gate from deciding; the log tells which."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Sent to the engine at `at`, with so much ahead of it, at that pace; and what was said then."""

    at: Instant
    ahead: Ahead
    pace: Pace
    said: TtftForecast


@dataclass(eq=False, slots=True)
class Ticket:
    """Mutable state of a request; the dispatcher is its only writer."""

    request: Request
    footprint: Footprint
    forecast: LengthForecast | None
    timeline: Timeline
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    entry: Waiting | None = None
    """Where it stood in the queue last."""
    phase: Phase = Phase.QUEUED
    lease: Lease | None = None
    decision: str = "ADMIT"
    predicted_ttft: Duration | None = None
    engine_start: EngineStart | None = None
    departures: tuple[asyncio.Task[None], ...] = ()
    """Victims on their way out of the engine; the request starts when they have left."""
    service_time: Duration = _ZERO
    """Predicted time for which its owner's whole quota would be busy with it."""
    tenant_delay: Duration = _ZERO
    """How far weighted fair queueing moves it back behind its tenant's other work."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Of its prompt, those the engine had in its cache when it began."""
    is_resumable: bool = False
    """Whether it can be preempted and resumed without the client noticing."""
    outcome: Outcome | None = None
    _timeout: asyncio.Timeout | None = None

    def renew_grant(self) -> None:
        """For its next turn."""
        self.granted = asyncio.get_running_loop().create_future()

    def refuse(self, reject: Reject) -> None:
        """Tells who waits for its turn, who asks for the next one, or who is inside `revocable`."""
        if self.granted.done():
            self.renew_grant()
        was_let_in = self.timeline.dispatched is not None
        self.granted.set_exception(Rejected(self.request, reject, is_evicted=was_let_in))
        self.granted.exception()  # taken: a caller that leaves just now is not there to do so
        if self._timeout is not None:
            self._timeout.reschedule(0)

    @asynccontextmanager
    async def revocable(self) -> AsyncIterator[None]:
        """For a turn that is one call: cancels the block and raises Rejected once it is refused; it may have
        been since its turn came, and may be in the turn of the event loop in which the call comes back."""
        self.raise_if_refused()
        self._timeout = asyncio.timeout(None)
        try:
            async with self._timeout:
                yield
        except Exception:
            self.raise_if_refused()
            raise
        finally:
            self._timeout = None
        self.raise_if_refused()

    def raise_if_refused(self) -> None:
        """Its outcome is counted and its memory given to others: that is what its caller is told."""
        if self.outcome is not None:
            self.granted.result()

    def move(self, to: Phase) -> None:
        self.phase = moved(self.phase, to)

    @property
    def rank(self) -> int:
        return 0 if self.entry is None else self.entry.rank[0]

    @property
    def queue_ms(self) -> float:
        queue = self.timeline.queue
        return 0.0 if queue is None else to_milliseconds(queue)

    @property
    def predicted_ttft_ms(self) -> float | None:
        return None if self.predicted_ttft is None else to_milliseconds(self.predicted_ttft)

    def as_running(self, now: Instant, held_bytes: int, remaining_steps: int, pace: Pace | None) -> Running:
        done = self.request.prompt_tokens + self.timeline.output_tokens
        recompute = Duration(0) if pace is None else scaled(pace.per_prompt_token, done)
        return Running(
            request_id=self.request.id,
            priority=self.request.service_class.priority,
            freed_bytes=held_bytes,
            slack=self.slack(now),
            recompute=recompute,
            remaining_steps=remaining_steps,
            preemptions=self.preemptions,
        )

    def footprint_to_resume(self, geometry: KvGeometry) -> Footprint:
        """Its tokens so far are read again with the prompt."""
        request, done = self.request, self.timeline.output_tokens
        left = request.max_output_tokens - done
        forecast = None if self.forecast is None else self.forecast.remaining(after=done)
        return generate_footprint(
            geometry,
            prompt_tokens=request.prompt_tokens + done,
            max_output_tokens=left,
            expected_tokens=left if forecast is None else forecast.mean,
            deviation_tokens=0.0 if forecast is None else forecast.deviation,
        )

    def slack(self, now: Instant) -> Duration | None:
        """Time left to the next token's deadline; TPOT is a mean, so being ahead of it is slack too."""
        slo, seen = self.request.slo, self.timeline
        if seen.first_token is None:
            deadline = slo.first_token_deadline(seen.arrival)
            return None if deadline is None else between(now, deadline)
        if slo.tpot is None:
            return None
        return between(now, Instant(seen.first_token + slo.tpot * seen.output_tokens))
