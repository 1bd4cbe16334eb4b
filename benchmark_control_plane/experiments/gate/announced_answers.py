"""A gate in virtual time that knows of the answer which an admitted reranking announces, and reserves for it.

What it does from the admission of a reranking until its answer is sent or its workflow is lost:

- memory: the quota of the LLM is smaller by what the announced answers need, so nothing else starts there;
- time: announced answers count as work ahead and as decoding requests where generations are admitted, and in
  the price of an embedding pass.

With `early` it also rejects a stage if the gate, asked now, would reject a later one of the workflow.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from benchmark_control_plane.judge.records import PartialResponse
from benchmark_control_plane.judge.simulated_target import SimulatedTarget
from benchmark_control_plane.judge.workflow_stages import STAGES
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.clock import Instant, between, scaled, to_seconds
from controlplane.core.decision import Outcome
from controlplane.core.generation import Sampling
from controlplane.core.memory_ledger import generate_footprint
from controlplane.core.pool_view import Share, Waiting
from controlplane.core.ports import PauseCost
from controlplane.core.request import Kind, Owner, Timeline
from controlplane.policy.sharing.pass_size import PauseCosts, TimeLeft, WeightedSlo
from controlplane.service.gate.snapshot import SnapshotBuilder
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin
from controlplane.service.ticket import TICKETS, Ticket

# Part of the LLM's quota that is never held back.
_LEAST_QUOTA = 0.5
_SIZES = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Reserve:
    """What a gate does about announced answers; the stages named by `early` are rejected early.

    The size of an answer is its true one, or the mean of all with `is_mean`.
    """

    memory: bool = False
    time: bool = False
    early: tuple[str, ...] = ()
    is_mean: bool = False


class _Granted(list[Ticket]):
    """Collects tickets, and calls `on_granted` when one of them is admitted."""

    def __init__(self, on_granted: Callable[[], None]) -> None:
        super().__init__()
        self._on_granted = on_granted

    def append(self, ticket: Ticket) -> None:
        """Adds a ticket that is not decided yet."""
        super().append(ticket)
        ticket.granted.add_done_callback(self._decided)

    def _decided(self, granted: "asyncio.Future[None]") -> None:
        if not granted.cancelled() and granted.exception() is None:
            self._on_granted()


class _AnnouncingSnapshots(SnapshotBuilder):
    """Views of the pool in which announced answers count as forwarded to the LLM."""

    def __init__(self, plain: SnapshotBuilder, announced: Callable[[], Sequence[Waiting]]) -> None:
        super().__init__(
            plain.ledger, plain.tickets, plain.generators, plain.encoders, plain.pace_estimators,
            plain.engine_leases, plain.ttft, plain.prefixes, plain.time_pricing,
        )  # fmt: skip
        self.announced = announced

    def share(self, owner: Owner, extra_slots: int, now: Instant) -> Share:
        """The part of one owner."""
        share, announced = super().share(owner, extra_slots, now), self.announced()
        if owner is not Owner.LLM or not announced:
            return share
        ahead, leases, load = share.engine_work_ahead, self.engine_leases, share.decode_load
        assert ahead is not None and leases is not None

        def work_ahead(waiting: Waiting) -> float:
            before = leases.precedence.before(waiting, announced)
            return ahead(waiting) + sum(other.work for other in before)

        if load is not None:
            for entry in announced:
                load = load.with_request(entry.request, entry.footprint)
        return replace(share, engine_work_ahead=work_ahead, decode_load=load)


class AnnouncingTarget:
    """A simulated target whose gate is told the workflows of its requests."""

    def __init__(self, target: SimulatedTarget, requests: Sequence[PlannedRequest], reserve: Reserve) -> None:
        self._target, self._reserve = target, reserve
        self._dispatcher = target.service.gate.dispatcher
        plain = self._dispatcher.snapshots
        self._generator = next(iter(plain.generators.values()))
        self._full = self._dispatcher.ledger.quota(Owner.LLM)
        self._announced: dict[str, Waiting] = {}
        self._began: dict[str, float] = {}
        self._changes: set[asyncio.Task[None]] = set()
        self._stages: dict[str, list[PlannedRequest]] = {}
        for request in requests:
            if request.stage is not None:
                self._stages.setdefault(request.stage.workflow, []).append(request)
        answers = [r for r in requests if r.stage is not None and r.kind is Kind.GENERATE]
        self._means = [round(mean(getattr(r, name) for r in answers)) for name in _SIZES]
        if reserve.time:
            self._dispatcher.snapshots = _AnnouncingSnapshots(plain, lambda: list(self._announced.values()))
            for embedder in plain.encoders.values():
                embedder.pause_cost = self._pause_cost

    async def send(self, planned: PlannedRequest, answer: PartialResponse) -> None:
        """Sends a request, and announces the answer of its workflow once its reranking is admitted."""
        stage = planned.stage
        if stage is None or planned.id.startswith("probe"):
            await self._target.send(planned, answer)
            return
        now = asyncio.get_running_loop().time()
        elapsed_ms = 1e3 * (now - self._began.setdefault(stage.workflow, now))
        later = [
            other
            for other in self._stages[stage.workflow]
            if other.stage is not None and STAGES.index(other.stage.name) > STAGES.index(stage.name)
        ]
        if stage.name in self._reserve.early and await self._would_refuse(later, elapsed_ms):
            answer.loss, answer.error = Outcome.REJECTED, "a later stage would be refused"
            answer.sent = now
            return
        self._withdraw(stage.workflow)
        if stage.name != "rerank":
            await self._target.send(planned, answer)
            return
        (chat,) = later
        entry = await self._entry(chat, stage.deadline_ms - elapsed_ms)
        collected = TICKETS.set(_Granted(lambda: self._announce(stage.workflow, entry)))
        try:
            await self._target.send(planned, answer)
        finally:
            TICKETS.reset(collected)
        # After its deadline the client sends no answer.
        is_over = asyncio.get_running_loop().time() - self._began[stage.workflow] >= stage.deadline_ms / 1e3
        if answer.loss is not None or is_over:
            self._withdraw(stage.workflow)

    async def settle(self) -> None:
        """Waits until the engine has confirmed all quotas."""
        await asyncio.gather(*self._changes)

    def _announce(self, workflow: str, entry: Waiting) -> None:
        self._announced[workflow] = entry
        self._reserve_memory()

    def _withdraw(self, workflow: str) -> None:
        if self._announced.pop(workflow, None) is not None:
            self._reserve_memory()

    def _reserve_memory(self) -> None:
        if not self._reserve.memory:
            return
        reserved = sum(entry.footprint.peak for entry in self._announced.values())
        quota = max(round(_LEAST_QUOTA * self._full), self._full - reserved)
        self._dispatcher.ledger.set_quota(Owner.LLM, quota)
        change = asyncio.create_task(self._generator.set_quota(quota, use_ceiling_bytes=self._full))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)

    def _pause_cost(self) -> PauseCost | None:
        """What a pass costs the generations in the engine and the announced ones."""
        cost, pace = self._dispatcher.pause_cost(), self._dispatcher.pace_estimators.llm.pace
        if cost is None or pace is None or not self._announced:
            return cost
        now, waiting = self._target.service.gate.clock.now(), []
        for entry in self._announced.values():
            request, footprint = entry.request, entry.footprint
            deadline = request.first_deadline
            assert deadline is not None
            work = scaled(pace.per_prompt_token, request.prefill_tokens) + scaled(pace.step, footprint.steps)
            spare = to_seconds(between(now, deadline)) - work / 1e9
            waiting.append(WeightedSlo(request.service_class.weight, (TimeLeft(spare),)))
        more, plain = PauseCosts((), waiting), cost
        return lambda pauses: [a + b for a, b in zip(plain(pauses), more(pauses), strict=True)]

    async def _entry(self, chat: PlannedRequest, left_ms: float) -> Waiting:
        """The answer as it would wait at the gate now, with so much time left."""
        prompt, output = (getattr(chat, name) for name in _SIZES)
        if self._reserve.is_mean:
            prompt, output = self._means
        limit = chat.max_tokens or output
        job = await self._target.service.intake.completion(
            _origin(chat, left_ms), self._generator.model, range(prompt), max_tokens=limit,
            sampling=Sampling(max_tokens=limit),
        )  # fmt: skip
        footprint = generate_footprint(
            self._generator.geometry, prompt_tokens=prompt, max_output_tokens=limit, expected_tokens=output
        )
        return self._dispatcher.entry_for(Ticket(job.request, footprint, None, Timeline(job.request.arrival)))

    async def _would_refuse(self, later: Sequence[PlannedRequest], elapsed_ms: float) -> bool:
        """Whether the gate would refuse one of these stages if it were sent now."""
        for planned in later:
            assert planned.stage is not None
            stated = planned.stage.stated_ms(elapsed_ms) or 0.0
            run: Any
            if planned.kind is Kind.GENERATE:
                entry = await self._entry(planned, stated)
                run, name = self._dispatcher.dry_run(entry), entry.request.id
            else:
                inputs = [range(length) for length in planned.lengths]
                job = await self._target.service.intake.embeddings(_origin(planned, stated), None, inputs)
                run, name = self._target.service.gate.dry_run(job), job.request.id
            if name in dict(run.plan.rejections):
                return True
        return False


def _origin(planned: PlannedRequest, left_ms: float) -> RequestOrigin:
    hints = RequestHints(planned.service_class, e2e_ms=left_ms)
    return RequestOrigin(f"announced-{planned.id}", Caller(planned.tenant), hints)
