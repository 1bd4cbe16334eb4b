"""What belongs to one running service? Backends started together, the gate built on what they report."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from controlplane.config import Config, ConfigError
from controlplane.config.reconfigure import changeable, changed
from controlplane.core.clock import NO_TIME, Clock, Duration
from controlplane.core.device import DeviceMemory
from controlplane.core.errors import BackendDown
from controlplane.core.memory import MemoryLedger, Quota
from controlplane.core.ports import (
    Embedder,
    EmbeddingPass,
    EngineState,
    EngineStep,
    Generator,
    LengthPredictor,
)
from controlplane.core.request import Kind, Owner
from controlplane.metrics import Metrics
from controlplane.policy.registry import engine_precedence
from controlplane.service.gate.backpressure import RateLimiter, TenantLimits
from controlplane.service.gate.dispatcher import Dispatcher, Policies
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.gate.intake import Intake
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.pool import longest_input_bytes, share_out, shared_pool
from controlplane.service.memory.quota_controller import QuotaController, quota_controller
from controlplane.service.prediction.fail_open import FailOpen, GuardedLengthPredictor, Subject
from controlplane.service.prediction.length_training import (
    LengthTraining,
    calibration_readings,
    lengths_of,
)
from controlplane.service.prediction.prompt_vector_cache import PromptVectorCache
from controlplane.service.runtime.engine_control import EngineConfigurator
from controlplane.service.runtime.health import Fault
from controlplane.service.runtime.shutdown import Stage, stop_all
from controlplane.service.runtime.timers import MonotonicClock, PeriodicTimer, SchedulerTimer
from predictors.output_length.learned import LearnedLengths
from predictors.timing.step_time import StepWork

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    kind: str
    max_model_len: int
    root: str


class Service:
    """`intake` and `dispatcher` exist from `start` on."""

    intake: Intake
    dispatcher: Dispatcher

    def __init__(
        self,
        config: Config,
        generators: Sequence[Generator],
        embedders: Sequence[Embedder],
        *,
        workspace_bytes: int,
        device_memory: Callable[[], DeviceMemory] | None = None,
        monitor: Callable[[Callable[[int], None]], MemoryMonitor] | None = None,
        clock: Clock | None = None,
        ticks: PeriodicTimer | None = None,
        lengths: LengthPredictor | None = None,
    ) -> None:
        """`device_memory` is asked for once the backends run; without it their memory is static. `lengths`
        stands in for the predictor that the configuration names."""
        self.config = config
        self._device_memory = device_memory
        self._ticks = ticks or SchedulerTimer()
        self._make_monitor = monitor
        self.monitor: MemoryMonitor | None = None
        self.quota_controller: QuotaController | None = None
        self._clock = clock or MonotonicClock()
        kinds = [kind for kind, served in ((Kind.GENERATE, generators), (Kind.EMBED, embedders)) if served]
        self.metrics = Metrics(config.service_classes().values(), kinds)
        self.fail_open = FailOpen(self.metrics)
        self._generators = {generator.model: generator for generator in generators}
        self._engine_rules = EngineConfigurator(generators, config.engine_options())
        self._changing = asyncio.Lock()
        self._embedders = {embedder.model: embedder for embedder in embedders}
        self._workspace_bytes = workspace_bytes
        self._lengths = lengths or lengths_of(config)
        self._learning = None
        # On another clock than the host's, whoever drives it also says when to learn.
        if clock is None and isinstance(self._lengths, LearnedLengths):
            section = config.predictors
            self._learning = LengthTraining(
                self._lengths, every_seconds=section.train_every_ms / 1_000, file=section.file
            )
        # Those that yield the CPU do not ask.
        self._ceded: Duration | None = NO_TIME
        self._is_started = False

    async def start(self) -> None:
        """Raises BackendDown or ConfigError; then, and when it is cancelled, nothing is left running."""
        starts = (backend.start() for backend in self._backends())
        try:
            results = await asyncio.gather(*starts, return_exceptions=True)
            if errors := [r for r in results if isinstance(r, BaseException)]:
                raise errors[0]
            self._build()
            if (quotas := self.quota_controller) is not None:
                await quotas.start()
                self._ticks.every(self.config.quota.tick_ms / 1_000, lambda: quotas.tick(self._clock.now()))
            if self._learning is not None:
                await self._learning.start()
            if self._make_monitor is not None:
                self.monitor = self._make_monitor(self._withhold)
                self.monitor.allocated = lambda: sum(e.allocator_bytes for e in self._embedders.values())
                self.monitor.start(self.config.pool.monitor_ms / 1_000)
        except BaseException:
            await stop_all(self._repeating(), self._lasting())
            raise
        self._is_started = True

    def _backends(self) -> list[Generator | Embedder]:
        return [*self._generators.values(), *self._embedders.values()]

    async def stop(self) -> None:
        if not self._is_started:
            return
        self._is_started = False
        await stop_all(self._repeating(), {"the drain": self.drain}, self._lasting())

    def _repeating(self) -> Stage:
        ticks: Stage = {"the quotas' ticks": self._ticks.stop}
        return ticks if self.monitor is None else {**ticks, "the memory monitor": self.monitor.stop}

    def _lasting(self) -> Stage:
        """What those who are drained still need."""
        engines: Stage = {backend.model: backend.stop for backend in self._backends()}
        return engines if self._learning is None else {**engines, "learning": self._learning.stop}

    async def drain(self, grace: float | None = None) -> None:
        """Ends admission; returns when nothing runs any more, or after `grace` (the drain time) seconds."""
        await self.dispatcher.drain(self.config.server.drain_ms / 1_000 if grace is None else grace)

    def _build(self) -> None:
        config, clock = self.config, self._clock
        pool = shared_pool(
            config, self._generators, self._embedders, self._workspace_bytes, self._device_memory
        )
        shares = self._fixed_shares() if pool is None else pool.sharing.nominal
        ledger = MemoryLedger({owner: Quota(share) for owner, share in shares.items()})
        limits = {
            name: TenantLimits(t.requests_per_minute, t.tokens_per_minute)
            for name, t in config.tenants.items()
        }
        self.dispatcher = Dispatcher(
            clock,
            ledger,
            _policies(config),
            self._generators,
            self._embedders,
            GuardedLengthPredictor(self._lengths, self.fail_open),
            self.metrics,
            RateLimiter(limits),
            TenantQueues(_weights(config)),
        )
        for generator in self._generators.values():
            generator.on_step = self._note_step
        for embedder in self._embedders.values():
            embedder.on_pass = partial(self._note_pass, embedder.model)
            embedder.batch_limit = self._batch_time_limit
        self.intake = Intake(
            clock,
            self._generators,
            self._embedders,
            config.service_classes(),
            config.default_class(),
            keeps_features=isinstance(self._lengths, LearnedLengths),
            seen_vectors=PromptVectorCache(config.predictors.encoder) if config.predictors.encoder else None,
        )
        if pool is not None:
            self.quota_controller = quota_controller(pool, config, clock, self.dispatcher)

    def _withhold(self, kept: int) -> None:
        """The device has less than was planned: batches give way, the engine's cache cannot."""
        if self.quota_controller is not None:
            self.quota_controller.withheld = kept
            return
        embedders = self._embedders.values()
        whole = sum(embedder.workspace_bytes for embedder in embedders)
        share_out(max(whole - kept, sum(map(longest_input_bytes, embedders))), embedders)

    def _batch_time_limit(self) -> Duration | None:
        """How long an embedding batch may keep the device now."""
        self._ceded = self.dispatcher.decode_slack()
        return self._ceded

    def _note_step(self, done: EngineStep) -> None:
        """Called from where the engine's tokens are read: what is raised here would end the engine."""
        with self.fail_open[Subject.PACE]:
            work = StepWork(done.prefill_tokens, done.decodes, done.cells)
            is_alone = not any(embedder.is_computing for embedder in self._embedders.values())
            paces = self.dispatcher.paces[Owner.LLM]
            paces.observe_work(work, done.took, waited=done.waited, is_alone=is_alone, ceded=self._ceded)

    def _note_pass(self, model: str, done: EmbeddingPass) -> None:
        with self.fail_open[Subject.PACE]:
            self.metrics.batch_tokens.observe(done.padded_tokens)
            paces = self.dispatcher.paces[Owner.EMBEDDING]
            paces.observe_prefill(done.tokens, done.elapsed, model=model)

    def _fixed_shares(self) -> Mapping[Owner, int]:
        kv_bytes = sum(generator.kv_bytes for generator in self._generators.values())
        return {Owner.LLM: kv_bytes, Owner.EMBEDDING: self._checked_workspace()}

    def _checked_workspace(self) -> int:
        # Each model has its own process, so their batches are on the device side by side.
        together = sum(embedder.workspace_bytes for embedder in self._embedders.values())
        if together > self._workspace_bytes:
            raise ConfigError(
                f"models.embeddings {', '.join(self._embedders)}: the largest batches take {together} bytes "
                f"and quota.embedding gives {self._workspace_bytes}; lower batch_tokens, or raise "
                "quota.embedding.nominal or pool.memory"
            )
        return self._workspace_bytes if self._embedders else 0

    async def check(self) -> None:
        """Raises BackendDown naming the backend that does not really answer."""
        if not self._is_started:
            raise BackendDown("the service is starting or stopping")
        if self.dispatcher.is_closed:
            raise BackendDown("the service was drained: it accepts nothing more; end it, and start it anew")
        for backend in self._backends():
            await backend.check()

    def impaired(self) -> dict[str, str]:
        """What does not go on as it should though requests are served, with the kind of fault."""
        repeated = {
            "decisions": self.dispatcher,
            "quotas": self.quota_controller,
            "memory_monitor": self.monitor,
        }
        found = {
            name: work.health.fault.value
            for name, work in repeated.items()
            if work is not None and work.health.fault is not None
        }
        return found | ({"learning": Fault.DEFECT.value} if self.fail_open.are_failing else {})

    def changeable(self) -> dict[str, dict[str, Any]]:
        """What `reconfigure` may change, as it is."""
        return changeable(self.config)

    async def reconfigure(self, content: object) -> None:
        """Other policies and parameters from now on, in the engine and then in the gate, one change after the
        other. Raises ConfigError, and what `EngineConfigurator.become` does."""
        async with self._changing:
            config = changed(self.config, content)
            policies = _policies(config)
            await self._engine_rules.apply(config.engine_options())
            self.config = config
            self.dispatcher.set_policies(policies)

    def models(self) -> list[ModelCard]:
        roots = {model.served_name: model.model for model in self.config.models.all()}
        sizes = {g.model: ("generate", g.max_model_tokens) for g in self._generators.values()}
        sizes |= {e.model: ("embed", e.max_input_tokens) for e in self._embedders.values()}
        return [ModelCard(model, kind, size, roots[model]) for model, (kind, size) in sizes.items()]

    def embedding_dimensions(self, model: str) -> tuple[int, tuple[int, ...]]:
        """The model's own length and all that may be asked for. Raises KeyError."""
        embedder = self._embedders[model]
        return embedder.dimension, tuple(embedder.supported_dimensions)

    def state(self) -> dict[str, object]:
        """What is held and who waits, for a person."""
        return {
            "owners": {owner.value: self._owner_state(owner) for owner in Owner},
            "device": None if self.monitor is None else self.monitor.to_json(),
            "sharing": None if self.quota_controller is None else self.quota_controller.to_json(),
            "requests": [
                {
                    "id": ticket.request.id,
                    "class": ticket.request.service_class.name,
                    "kind": ticket.request.kind.value,
                    "phase": ticket.phase.value,
                    "prompt_tokens": ticket.request.prompt_tokens,
                    "output_tokens": ticket.timeline.output_tokens,
                    "preemptions": ticket.preemptions,
                }
                for ticket in self.dispatcher.tickets()
            ],
        }

    def _owner_state(self, owner: Owner) -> dict[str, int]:
        self.dispatcher.sync_engine_leases()
        ledger = self.dispatcher.ledger
        leases = ledger.table(owner)
        return {
            "quota_bytes": ledger.quota(owner).nominal,
            "held_bytes": ledger.held(owner),
            "deficit_bytes": ledger.deficit(owner),
            "reserved_bytes": int((leases.base + leases.per_step * leases.steps).sum()),
            "running": len(leases),
            "waiting": self.dispatcher.waiting(owner),
        }

    def metrics_text(self) -> bytes:
        """Prometheus exposition."""
        m, states = self.metrics, {owner.value: self._owner_state(owner) for owner in Owner}
        engine = self._engine_states()

        def each(key: str) -> Mapping[str, float]:
            return {owner: state[key] for owner, state in states.items()}

        return m.exposition(
            {
                m.quota_bytes: each("quota_bytes"),
                m.held_bytes: each("held_bytes"),
                m.deficit_bytes: each("deficit_bytes"),
                m.reserved_bytes: each("reserved_bytes"),
                m.running: each("running"),
                m.waiting: each("waiting"),
                m.used_bytes: {owner: state.used_bytes for owner, state in engine.items()},
                m.ceded_bytes: {owner: state.ceded_bytes for owner, state in engine.items()},
                m.engine_running: {owner: state.running for owner, state in engine.items()},
                m.engine_waiting: {owner: state.waiting for owner, state in engine.items()},
                **calibration_readings(self._lengths, m),
                **({} if self.quota_controller is None else self.quota_controller.readings(m)),
                **self.dispatcher.ttft.readings(m),
                **({} if self.monitor is None else self.monitor.readings(m)),
                m.stall_count: {
                    Owner.LLM: sum(generator.stall_count for generator in self._generators.values()),
                    Owner.EMBEDDING: sum(embedder.stall_count for embedder in self._embedders.values()),
                },
                m.restarts: sum(embedder.restarts for embedder in self._embedders.values()),
                m.out_of_memory: sum(embedder.out_of_memory for embedder in self._embedders.values()),
                m.engine_preemptions: {owner: state.preemptions for owner, state in engine.items()},
                m.engine_recompute_tokens: {
                    owner: state.recompute_tokens
                    for owner, state in engine.items()
                    if state.recompute_tokens is not None
                },
            }
        )

    def _engine_states(self) -> dict[str, EngineState]:
        """A dead engine has no state; its last one would look alive."""
        try:
            states = [generator.state() for generator in self._generators.values()]
            return {Owner.LLM.value: states[0]} if states else {}
        except BackendDown:
            return {}


def _weights(config: Config) -> dict[str, float]:
    """Of every tenant as soon as one states any."""
    stated = {name: tenant.weight for name, tenant in config.tenants.items()}
    is_any = any(weight is not None for weight in stated.values())
    return {name: weight or 1.0 for name, weight in stated.items()} if is_any else {}


def _policies(config: Config) -> Policies:
    engine = config.engine_options()
    return Policies(
        config.admission_policy(),
        config.ordering_policy(),
        config.engine_queue(),
        None if engine is None else engine_precedence(engine),
    )
