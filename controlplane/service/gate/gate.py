"""Gate: entry point of the service for requests (generate, embed, dry run, drain)."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from controlplane.core.clock import Clock, Duration, Instant, seconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.errors import BackendDown
from controlplane.core.ports import Generator, Vectors
from controlplane.core.request import Request
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.device_contention import DeviceContention
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.gate.explanation import DryRun, render_dry_run, render_history
from controlplane.service.gate.intake import make_ticket
from controlplane.service.gate.policies import Policies
from controlplane.service.gate.rate_limits import RateLimiter
from controlplane.service.gate.start_timeouts import StartTimeouts
from controlplane.service.gate.token_stream import TokenStream, outcome_of_error
from controlplane.service.prediction.fail_open import GuardedLengthPredictor
from controlplane.service.request_jobs import EmbedJob, GenerateJob
from controlplane.service.request_trace import TRACE
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.ticket import TICKETS, Rejected, Ticket

_CLOSING = Reject(Reason.SHUTTING_DOWN, seconds(1))


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of one embedding request, in the order of its inputs, and its ticket."""

    ticket: Ticket
    vectors: Vectors


class Gate:
    """Serves each request from its arrival to its last token; the `dispatcher` decides when it starts.

    `on_arrival` is called with each request that arrives, before any decision.
    """

    def __init__(
        self,
        clock: Clock,
        dispatcher: Dispatcher,
        generators: Mapping[str, Generator],
        encoders: EncoderRegistry,
        lengths: GuardedLengthPredictor,
        rates: RateLimiter,
        supervisors: Mapping[str, EngineSupervisor],
        start_timeouts: StartTimeouts,
    ) -> None:
        self.dispatcher = dispatcher
        self.on_arrival: Callable[[Request], None] | None = None
        self.is_closed = False
        self.clock = clock
        self._generators = generators
        self._supervisors = supervisors
        self._encoders = encoders
        self._lengths = lengths
        self._new_ticket = partial(make_ticket, generators=generators, lengths=lengths)
        self._rates = rates
        self._start_timeouts = start_timeouts
        self._contention = DeviceContention(generators.values(), encoders)

    async def generate(self, job: GenerateJob) -> TokenStream:
        """Starts a generation request; returns once it is admitted.

        Raises Rejected, or DecisionFailed if a policy raises.
        Cancelling the call while the request waits aborts it; afterwards the stream's `aclose` does.
        """
        ticket = self._traced_ticket(job)
        self.dispatcher.prefixes.arrived(ticket, job)
        await self._admit(ticket)
        self._start_timeouts.forwarded(ticket)
        return TokenStream(self.dispatcher, self._generators[job.request.model], ticket, job)

    async def embed(self, job: EmbedJob) -> Embedded:
        """Computes the vectors of one embedding request; cancelling the call aborts it.

        Raises Rejected, DecisionFailed, Refused, BackendDown or BackendFailed.
        """
        with self._encoders.bound(job.embedder):
            return await self._embedded(job)

    async def _embedded(self, job: EmbedJob) -> Embedded:
        request, ticket = job.request, self._traced_ticket(job)
        await self._admit(ticket)
        try:
            deadline = request.first_deadline
            async with ticket.revocable():
                vectors = await job.embedder.embed(request, job.inputs, deadline=deadline)
        except BaseException as error:
            self.dispatcher.end(ticket, outcome_of_error(error))
            raise
        self.dispatcher.end(ticket, None)
        return Embedded(ticket, vectors)

    def charge(self, job: GenerateJob | EmbedJob) -> None:
        """Charges a job whose tokens are only estimated to its tenant's rate limits.

        Raises Rejected, or DecisionFailed; the request then counts as one that arrived and was rejected.
        """
        request = job.request
        wait = self._rates.try_charge(request.tenant, self.clock.now(), request.prompt_tokens)
        if wait is not None:
            ticket = self._traced_ticket(job)
            self.dispatcher.register(ticket)
            with self.dispatcher.failing_on_error(ticket):
                self._observe_arrival(request)
                self.dispatcher.reject_or_evict(ticket, Reject(Reason.RATE_LIMITED, wait))
            ticket.raise_if_failed()

    def dry_run(self, job: GenerateJob | EmbedJob) -> DryRun:
        """Returns the decision of a cycle now on the request that `job` would be; changes nothing.

        Raises Rejected once the gate is closed, and while the model's engine is down.
        """
        reject = self.outage(job.request.model) or (_CLOSING if self.is_closed else None)
        if reject is not None:
            raise Rejected(job.request, reject)
        ticket = self._new_ticket(job)
        self.dispatcher.prefixes.arrived(ticket, job)
        self._lengths.withdraw(job.request)
        return self.dispatcher.dry_run(self.dispatcher.entry_for(ticket))

    async def histories(self, request_id: str) -> list[dict[str, object]]:
        """All decisions on each open or remembered request of this id, rendered; the oldest first.

        `request_id` is that of the client, which several requests may share, or that of one request. For a
        request that waits, `now` is a dry run. Other tasks run between two requests: all that are remembered
        may have one id.
        """
        dispatcher, found = self.dispatcher, []
        for ticket in (*dispatcher.recorder.kept, *dispatcher.tickets()):
            if request_id in (ticket.request.id, ticket.request.id.rpartition("-")[0]):
                waits = ticket.entry is not None and ticket.lease is None and ticket.outcome is None
                run = render_dry_run(dispatcher.dry_run(ticket.entry)) if waits and ticket.entry else None
                found.append(render_history(ticket, self.clock.now()) | {"now": run})
                await asyncio.sleep(0)
        return found

    def tickets(self) -> tuple[Ticket, ...]:
        """All requests that have not ended, waiting or admitted."""
        return self.dispatcher.tickets()

    def set_policies(self, policies: Policies) -> None:
        """Decides by `policies` from now on; waiting requests keep their class and are ranked again."""
        self.dispatcher.accounting.set_policies(policies)
        self.dispatcher.set_policies(policies)
        self._start_timeouts.max_wait = policies.admission.options.max_wait

    def outage(self, model: str) -> Reject | None:
        """The rejection of a new request while the engine of its model is down; None while it is up.

        Embedding models have none, since their workers restart by themselves.
        """
        supervisor = self._supervisors.get(model)
        return None if supervisor is None else supervisor.rejection()

    def engine_died(self, model: str, error: BackendDown, reject: Reject) -> None:
        """Ends all requests of the model: those accepted fail with `error`, those that wait are rejected.

        A stream may not be read for long, so the leases are closed here and not where it ends.
        """
        affected = [ticket for ticket in self.tickets() if ticket.request.model == model]
        for ticket in affected:
            if ticket.timeline.dispatched is None:
                self.dispatcher.reject_or_evict(ticket, reject)
        self.dispatcher.fail([ticket for ticket in affected if ticket.outcome is None], error)
        self.dispatcher.prefixes.engine_died(model)

    def engine_restarted(self) -> None:
        """Sends a restarted engine the present state of device contention."""
        self._contention.notify()

    async def drain(self, grace: float) -> None:
        """Rejects new and waiting requests, and after `grace` seconds evicts those still running.

        Preempted requests count as running.
        """
        self.is_closed = True
        self.dispatcher.reject_waiting(_CLOSING)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self.dispatcher.until_idle()
        for ticket in self.tickets():
            self.dispatcher.evict(ticket, _CLOSING)

    async def _admit(self, ticket: Ticket) -> None:
        self.dispatcher.register(ticket)
        with self.dispatcher.failing_on_error(ticket):
            self._reject_or_enqueue(ticket)
        await self.dispatcher.wait_for_grant(ticket)

    def _traced_ticket(self, job: GenerateJob | EmbedJob) -> Ticket:
        ticket = self._new_ticket(job)
        ticket.trace = TRACE.get()
        if (collected := TICKETS.get()) is not None:
            collected.append(ticket)
        return ticket

    def _reject_or_enqueue(self, ticket: Ticket) -> None:
        request, now = ticket.request, self.clock.now()
        self._observe_arrival(request)
        if (outage := self.outage(request.model)) is not None:
            self.dispatcher.reject_or_evict(ticket, outage)
        elif self.is_closed:
            self.dispatcher.reject_or_evict(ticket, _CLOSING)
        elif (wait := self._charge_prompt(ticket, now)) is not None:
            self.dispatcher.reject_or_evict(ticket, Reject(Reason.RATE_LIMITED, wait))
        else:
            self.dispatcher.enqueue(ticket)

    def _observe_arrival(self, request: Request) -> None:
        if self.on_arrival is not None:
            self.on_arrival(request)

    def _charge_prompt(self, ticket: Ticket, now: Instant) -> Duration | None:
        """Charges what intake has not charged before; returns the wait if the rate limits are exceeded."""
        request, charged = ticket.request, ticket.charged_tokens
        if charged is None:
            return self._rates.try_charge(request.tenant, now, request.prompt_tokens)
        return self._rates.correct(request.tenant, now, charged, request.prompt_tokens)
