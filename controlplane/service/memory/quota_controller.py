"""Periodic control loop that moves the quotas between the LLM and the embeddings.

A tick moves from one pair of quotas to the next in an order in which no byte ever belongs to both owners: the
losing side is reduced first, and bytes that it still holds remain its own until they are freed. The LLM's
quota is enforced by the engine, the embeddings' by the budget of their batches. The engine gets two numbers:
its quota, within which requests start, and a use ceiling, up to which running requests may grow. A quota
below the memory in use stops starts at once, and the ceiling follows as requests end (`use_ceiling`); running
generations are preempted only for waiting embeddings of higher priority. A change that the engine or its
memory does not confirm is not in force: the failed tick restores the former quotas, and later ticks retry.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from controlplane.config import Config
from controlplane.core.clock import Clock, Duration, Instant, between, milliseconds
from controlplane.core.decision import Defer, Reason, Reject
from controlplane.core.engine_reports import EngineState
from controlplane.core.ports import Embedder
from controlplane.core.request import Kind, Owner, Request
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.sharing.lending import target_next, usable_bytes
from controlplane.policy.sharing.quota import bytes_to_reclaim, next_nominals, use_ceiling
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.memory.demand_forecast import EmbeddingDemand, RecentArrivals, urgencies
from controlplane.service.memory.engine_quota import EngineQuota
from controlplane.service.memory.pool import SharedPool, divided_pool, longest_input_bytes, split_budget
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.ticket import Ticket

# Between a tick and an early one. Nominal quotas move by elapsed time, so earlier ticks would move them no
# further.
_MIN_TICK_GAP = milliseconds(5)

OnMove = Callable[[Mapping[Owner, int], Mapping[Owner, int], Mapping[Owner, float]], None]
"""Called with the quotas before and after a change, and the urgency of each owner."""

_HEALTH_MESSAGES = ("quota changes are suspended", "quota changes resumed")


@dataclass(eq=False, slots=True)
class QuotaController:
    """Moves the quotas of one pool.

    `owned` are the nominal quotas, which follow urgency; `usable` are those in force, after lending.
    `withheld` bytes belong to neither, since the device has less memory than the ledger; nor do `reserved`
    ones, which workers hold.
    """

    clock: Clock
    dispatcher: Dispatcher
    pool: SharedPool
    encoders: EncoderRegistry
    demand: EmbeddingDemand
    owned: Mapping[Owner, int] = field(init=False)
    usable: Mapping[Owner, int] = field(init=False)
    urgency: Mapping[Owner, float] = field(init=False, default_factory=lambda: dict.fromkeys(Owner, 0.0))
    reclaimed_bytes: int = field(init=False, default=0)
    moves: int = field(init=False, default=0)
    on_move: OnMove = field(init=False, default=lambda before, after, urgency: None)
    withheld: int = field(init=False, default=0)
    reserved: int = field(init=False, default=0)
    health: HealthTracker = field(init=False, default_factory=lambda: HealthTracker(*_HEALTH_MESSAGES))
    _target: int = field(init=False)
    engine: EngineQuota = field(init=False)
    _max_workspace: int = field(init=False)
    _least_budget: int = field(init=False)
    _bytes_per_token: float = field(init=False)
    _recent: RecentArrivals = field(init=False, default_factory=RecentArrivals)
    _moved_at: Instant | None = field(init=False, default=None)
    _budget_before_cut: tuple[Instant, int] | None = field(init=False, default=None)
    _is_ticking: bool = field(init=False, default=False)
    _ticked: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _urgent_tick: asyncio.Task[None] | None = field(init=False, default=None)
    _last_tick: Instant | None = field(init=False, default=None)
    _last_report: EngineState | None = field(init=False, default=None)
    # New reports of the engine until one no longer has the requests that were preempted last.
    _reports_due: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.owned = self.usable = self.pool.sharing.nominal
        self._target = self.owned[Owner.LLM]
        self.engine = EngineQuota(self.pool.generator, self.pool.memory)
        self._measure_workers()
        self.dispatcher.on_not_admitted = self._not_admitted

    def _measure_workers(self) -> None:
        workers = self.encoders.running
        self._max_workspace = sum(worker.workspace_bytes for worker in workers)
        self._least_budget = sum(map(longest_input_bytes, workers))
        self._bytes_per_token = max(
            longest_input_bytes(worker) / worker.max_input_tokens for worker in workers
        )
        self._announce_largest()

    def _announce_largest(self) -> None:
        self.dispatcher.set_largest_request(
            {Owner.LLM: self.pool.sharing.options.highest, Owner.EMBEDDING: self._max_workspace}
        )

    def divided(self, config: Config, workers: Sequence[Embedder] | None = None) -> SharedPool:
        """The pool as `config` divides it for `workers`, by default the present ones, for `set_division`.

        Raises ConfigError.
        """
        embedders = tuple(self.encoders.values()) if workers is None else workers
        return divided_pool(config.quota, self.pool.generator, embedders, self.pool.memory)

    def set_division(self, pool: SharedPool, forecast_quantile: float | None) -> None:
        """Replaces shares and limits; the quotas move there from the next tick on, in the usual steps."""
        self.pool, self.demand.level = pool, forecast_quantile
        self._announce_largest()

    def withhold(self, withheld_bytes: int) -> None:
        """Withholds these bytes from both quotas, from the next tick on.

        Each kind keeps what its largest request needs; what is left then is not withheld.
        """
        self.withheld = withheld_bytes

    @property
    def least_llm_bytes(self) -> int:
        """Minimum of the LLM's quota."""
        return self.pool.sharing.options.lowest

    @property
    def least_bytes(self) -> int:
        """Minimum of the LLM's quota, plus the bytes of the longest input of each worker."""
        return self.least_llm_bytes + self._least_budget

    async def until_unused(self, needed: int) -> None:
        """Waits for a tick after which neither owner uses `needed` bytes of the pool."""
        await self.tick_now()
        while self._is_ticking or self._unused_bytes < needed:
            self._ticked.clear()
            await self._ticked.wait()

    def workers_changed(self) -> None:
        """Divides the present budget among the workers that run now."""
        self._measure_workers()
        split_budget(self._budget, self.encoders.running)

    @property
    def _unused_bytes(self) -> int:
        """Bytes of the pool that neither the engine nor the batches in flight may use."""
        room = self.pool.memory.workspace_room(self.pool.generator.state())
        return min(room, self.pool.memory.pool_bytes - self.engine.ceiling) - self._batches_in_flight()

    @property
    def _ownerless_bytes(self) -> int:
        """Withheld and reserved bytes, which belong to neither owner."""
        return self.withheld + self.reserved

    async def start(self) -> None:
        """Applies the nominal quotas. Raises Refused if the engine does not enforce quotas."""
        await self.engine.set(self.usable[Owner.LLM], self.usable[Owner.LLM])
        split_budget(self.usable[Owner.EMBEDDING], self.encoders.running)

    async def engine_restarted(self) -> None:
        """Applies the LLM's present quota to a new engine, which has its whole cache as quota."""
        self.pool.memory.engine_restarted()
        llm = self.dispatcher.ledger.quota(Owner.LLM)
        await self.engine.set(llm, llm)

    def observe_arrival(self, request: Request) -> None:
        """Counts an arriving request for urgency and forecasts."""
        self._recent.arrived[request.kind.owner] += 1
        self.demand.observe_arrival(request, self.clock.now())

    def _not_admitted(self, owner: Owner, decision: Defer | Reject) -> None:
        """Runs an early tick when a request was deferred or rejected for lack of memory, or because of it."""
        if decision.reason not in (Reason.NO_MEMORY, Reason.SLO_UNATTAINABLE, Reason.QUEUE_TIMEOUT):
            return
        if isinstance(decision, Reject):
            self._recent.rejected[owner] += 1
        now = self.clock.now()
        is_early = self._last_tick is not None and between(self._last_tick, now) < _MIN_TICK_GAP
        if not is_early and (self._urgent_tick is None or self._urgent_tick.done()):
            self._urgent_tick = asyncio.ensure_future(self.tick_now())

    async def tick_now(self) -> None:
        """Updates the quotas once; does nothing while an earlier tick waits for the engine."""
        if self._is_ticking:
            return
        now = self.clock.now()
        self._is_ticking, self._last_tick = True, now
        try:
            await self._rebalance(now)
        except Exception as error:
            self.health.failed(error)
        else:
            self.health.succeeded()
        finally:
            self._is_ticking = False
            self._ticked.set()

    async def _rebalance(self, now: Instant) -> None:
        owned = self.owned
        self._update_owned(now)
        try:
            await self._apply(usable_bytes(self.owned, self._demanded(now), self.pool.sharing), now)
        except Exception:
            # Otherwise the quotas would jump by all failed steps at once when the engine responds again.
            self.owned = owned
            raise

    def _update_owned(self, now: Instant) -> None:
        elapsed = Duration(0) if self._moved_at is None else between(self._moved_at, now)
        self._recent.fade(now)
        paces = {owner: self.dispatcher.pace_estimators.of(owner).pace for owner in Owner}
        remaining = self.dispatcher.ledger.remaining_steps(Owner.LLM)
        options = self.pool.sharing.options
        self.urgency = urgencies(
            self.dispatcher.tickets(), paces, remaining, self._recent, now, options.urgency
        )
        self._target = target_next(self._target, self.urgency, self.pool.sharing)
        self.owned = next_nominals(self.owned, self._target, elapsed=elapsed, options=options)
        self._moved_at = now

    def _demanded(self, now: Instant) -> dict[Owner, int]:
        """The bytes that each owner could use.

        For the LLM the predicted peak of its requests, those that wait in the engine included; for embeddings
        those in flight, waiting and forecast, up to full batches.
        """
        held = {owner: self._predicted_bytes(owner) for owner in Owner}
        forecast = int(self.demand.tokens(now) * self._bytes_per_token)
        embedding = min(self._max_workspace, held[Owner.EMBEDDING] + forecast)
        return {Owner.LLM: held[Owner.LLM], Owner.EMBEDDING: embedding}

    def _predicted_bytes(self, owner: Owner) -> int:
        leases = self.dispatcher.ledger.table(owner)
        peak = leases.final_bytes
        forwarded = set(compress(leases.ids, leases.base == 0))
        if forwarded:
            tickets = self.dispatcher.tickets()
            peak += sum(ticket.footprint.peak for ticket in tickets if ticket.request.id in forwarded)
        return peak + sum(waiting.footprint.peak for waiting in self.dispatcher.queued(owner))

    async def _apply(self, usable: Mapping[Owner, int], now: Instant) -> None:
        before, budget = self.dispatcher.ledger.quota(Owner.LLM), self._budget
        usable = self._subtract_ownerless(usable)
        try:
            llm, state = await self._move_llm(usable, before, now)
        except Exception:
            self._roll_back(before, budget, now)
            raise
        if llm > before:
            self._set(Owner.LLM, llm)
        room = self._embedding_less_ownerless(self.pool.memory.workspace_room(state))
        self._set_budget(max(0, min(usable[Owner.EMBEDDING], room, self._unclaimed_bytes)), now)
        if usable != self.usable:
            self.moves += 1
            self.on_move(self.usable, usable, self.urgency)
        self.usable = usable
        self.dispatcher.decide()

    def _subtract_ownerless(self, usable: Mapping[Owner, int]) -> dict[Owner, int]:
        """Takes withheld and reserved bytes from the embeddings, whose quota falls at once, then the LLM."""
        options, llm = self.pool.sharing.options, usable[Owner.LLM]
        embedding = self._embedding_less_ownerless(usable[Owner.EMBEDDING])
        rest = self._ownerless_bytes - (usable[Owner.EMBEDDING] - embedding)
        block = options.block_bytes
        spare = max(0, llm - options.lowest) // block * block
        return {Owner.LLM: llm - min(-(-rest // block) * block, spare), Owner.EMBEDDING: embedding}

    def _embedding_less_ownerless(self, embedding_bytes: int) -> int:
        """`embedding_bytes` less the withheld and reserved bytes, but enough for each worker's longest input.

        Fewer bytes than that are returned unchanged.
        """
        return max(min(embedding_bytes, self._least_budget), embedding_bytes - self._ownerless_bytes)

    async def _move_llm(
        self, usable: Mapping[Owner, int], before: int, now: Instant
    ) -> tuple[int, EngineState]:
        """Moves the engine's quota; returns the LLM's quota that it has confirmed, and its state."""
        state, llm = self.pool.generator.state(), usable[Owner.LLM]
        if llm < before:
            self._set(Owner.LLM, llm)
        elif llm > before:
            # The embedding budget is reduced first; the LLM gets what the batches in flight leave.
            self._set_budget(min(usable[Owner.EMBEDDING], self._budget), now)
            block = self.pool.sharing.options.block_bytes
            free = self.pool.memory.pool_bytes - self._ownerless_bytes - self._batches_in_flight()
            llm = max(before, min(llm, free // block * block))
        growth = self._predicted_growth(state) if state.used_bytes > llm else 0
        ceiling = use_ceiling(llm, self.engine.ceiling, used=state.used_bytes, growth=growth)
        self.engine.reported(state)
        is_in_force = (llm, ceiling) == (self.engine.quota, self.engine.ceiling)
        if not is_in_force or self.health.fault is not None:
            await self.engine.set(llm, ceiling)
            state = self.pool.generator.state()
        self._reclaim(llm, state)
        return llm, state

    def _roll_back(self, llm: int, budget: int, now: Instant) -> None:
        """Restores the quotas from before a failed change, as far as the engine's quota allows."""
        self._set(Owner.LLM, min(llm, self.engine.ceiling))
        self._set_budget(max(0, min(budget, self._unclaimed_bytes)), now)
        self.dispatcher.decide()

    @property
    def _unclaimed_bytes(self) -> int:
        """Bytes of the pool that the engine may not use and that are not withheld."""
        return self._embedding_less_ownerless(self.pool.memory.pool_bytes - self.engine.ceiling)

    def _predicted_growth(self, state: EngineState) -> int:
        """Bytes that the running requests need beyond present use until they end, in whole blocks.

        Leases grow by the token, and each request may begin one more block than that.
        """
        growth = LookAhead(self.dispatcher.ledger.table(Owner.LLM)).growth
        held = state.held_bytes or {}
        for ticket in self.dispatcher.tickets():
            if ticket.timeline.first_token is None and ticket.request.id in held:
                growth += max(0, ticket.footprint.base - held[ticket.request.id])
        block = self.pool.sharing.options.block_bytes
        return (-(-int(growth) // block) + state.running) * block

    def _reclaim(self, llm: int, state: EngineState) -> None:
        """Preempts generations beyond the LLM's quota if embeddings need their memory."""
        if state is not self._last_report:
            self._last_report, self._reports_due = state, max(0, self._reports_due - 1)
        if self._reports_due:
            return
        waiting = self.dispatcher.queued(Owner.EMBEDDING)
        if not waiting:
            return
        demanded = sum(entry.footprint.base for entry in waiting)
        priority = max(entry.request.service_class.priority for entry in waiting)
        free = max(0, self._budget - self.dispatcher.ledger.held(Owner.EMBEDDING))
        needed = bytes_to_reclaim(held=state.used_bytes, nominal=llm, free=free, demanded=demanded)
        if needed > 0 and (reclaimed := self.dispatcher.reclaim(needed, priority)):
            self.reclaimed_bytes += reclaimed
            # They leave at the next step, and its report still has them.
            self._reports_due = 2

    @property
    def _budget(self) -> int:
        return self.dispatcher.ledger.quota(Owner.EMBEDDING)

    def _batches_in_flight(self) -> int:
        """The embedding budget; after a cut the former one, until the batches sent under it have ended."""
        if self._budget_before_cut is None:
            return self._budget
        since, former = self._budget_before_cut
        if not any(self._is_computed_since(ticket, since) for ticket in self.dispatcher.tickets()):
            self._budget_before_cut = None
            return self._budget
        return max(self._budget, min(former, self.dispatcher.ledger.demanded(Owner.EMBEDDING)))

    @staticmethod
    def _is_computed_since(ticket: Ticket, since: Instant) -> bool:
        dispatched = ticket.timeline.dispatched
        is_out = ticket.lease is not None and ticket.request.kind is Kind.EMBED
        return is_out and dispatched is not None and dispatched <= since

    def _set_budget(self, budget: int, now: Instant) -> None:
        former = self._budget
        if budget == former:
            return
        if budget < former:
            most = former if self._budget_before_cut is None else max(former, self._budget_before_cut[1])
            self._budget_before_cut = (now, most)
        self._set(Owner.EMBEDDING, budget)
        split_budget(budget, self.encoders.running)

    def _set(self, owner: Owner, nominal: int) -> None:
        self.dispatcher.ledger.set_quota(owner, nominal)
        if owner is Owner.EMBEDDING:
            self.dispatcher.cap_footprints(owner, nominal)


def quota_controller(
    pool: SharedPool, config: Config, clock: Clock, dispatcher: Dispatcher, encoders: EncoderRegistry
) -> QuotaController:
    """Builds the quota controller of a configuration."""
    forecast = config.quota.forecast
    demand = EmbeddingDemand(milliseconds(forecast.window_ms), forecast.quantile)
    return QuotaController(clock, dispatcher, pool, encoders, demand)
