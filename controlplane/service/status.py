"""Reports state, served models, metrics and impaired parts of the service."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.core.engine_reports import EngineState
from controlplane.core.errors import BackendDown
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import Embedder, LengthPredictor
from controlplane.core.request import Owner
from controlplane.metrics import Metrics
from controlplane.service.decision_log.decision_log import DecisionLog
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.prediction.fail_open import FailOpen
from controlplane.service.prediction.length_training import calibration_readings
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.runtime.health_tracker import Fault, HealthTracker


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One served model.

    `kind` is generate, embed or rerank; `root` is the model's path or its name on the hub.
    """

    id: str
    kind: str
    max_model_len: int
    root: str


@dataclass(eq=False)
class ServiceStatus:
    """Reads the parts of a started service; changes nothing but the engine leases, which it syncs first."""

    config: Config
    supervisors: Mapping[str, EngineSupervisor]
    embedders: Mapping[str, Embedder]
    metrics: Metrics
    ledger: MemoryLedger
    dispatcher: Dispatcher
    lengths: LengthPredictor
    fail_open: FailOpen
    quota_controller: QuotaController | None
    monitor: MemoryMonitor | None
    decision_log: DecisionLog | None

    def __post_init__(self) -> None:
        self.generators = {name: each.generator for name, each in self.supervisors.items()}

    def impaired(self) -> dict[str, str]:
        """The repeated work that fails while requests are served, with the kind of fault.

        And `memory`, while bytes are withheld from the quotas.
        """
        health = self._health().items()
        found = {name: each.fault.value for name, each in health if each.fault is not None}
        if self.monitor is not None and self.monitor.withheld:
            found["memory"] = "withheld"
        return found | ({"learning": Fault.DEFECT.value} if self.fail_open.is_failing else {})

    def faults(self) -> dict[str, str]:
        """The parts that fail now, each in words: engines that are down, and those of `impaired`."""
        down = {f"engine {name}": each.to_json()["down"] for name, each in self.supervisors.items()}
        found = {name: str(reason) for name, reason in down.items() if reason is not None}
        found |= {name: text for name, each in self._health().items() if (text := each.text()) is not None}
        if self.monitor is not None and self.monitor.withheld:
            found["memory"] = (
                f"{self.monitor.withheld:,} bytes are withheld from the quotas, because the device has less "
                "free memory than was planned"
            )
        if self.fail_open.is_failing:
            found["learning"] = "a predictor fails, and requests continue with its default; see the log"
        return found

    def _health(self) -> dict[str, HealthTracker]:
        repeated = {
            "decisions": self.dispatcher,
            "quotas": self.quota_controller,
            "memory_monitor": self.monitor,
            "decision_log_rows": self.decision_log,
            "decision_log": None if self.decision_log is None else self.decision_log.writer,
        }
        return {name: work.health for name, work in repeated.items() if work is not None}

    def models(self) -> list[ModelCard]:
        """All served models."""
        roots = {model.served_name: model.model for model in self.config.models.all()}
        sizes = {g.model: ("generate", g.max_model_tokens) for g in self.generators.values()}
        rerankers = {model.served_name for model in self.config.models.rerankers}
        sizes |= {
            e.model: ("rerank" if e.model in rerankers else "embed", e.max_input_tokens)
            for e in self.embedders.values()
        }
        return [ModelCard(model, kind, size, roots[model]) for model, (kind, size) in sizes.items()]

    def context_tokens(self) -> int:
        """The longest context of a chat model; 0 without one."""
        return max((generator.max_model_tokens for generator in self.generators.values()), default=0)

    def embedding_dimensions(self, model: str) -> tuple[int, tuple[int, ...]]:
        """The model's native dimension and the shorter ones that it supports. Raises KeyError."""
        embedder = self.embedders[model]
        return embedder.dimension, tuple(embedder.supported_dimensions)

    def state(self) -> dict[str, object]:
        """Memory, quotas and requests, for the operator."""
        self.dispatcher.sync_engine_leases()
        return {
            "engines": {name: supervisor.to_json() for name, supervisor in self.supervisors.items()},
            "owners": self.owners(),
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

    def owners(self) -> dict[str, dict[str, int]]:
        """Memory and queues of each owner, as the gate knew them at its last cycle."""
        return {owner.value: self._owner_state(owner) for owner in Owner}

    def _owner_state(self, owner: Owner) -> dict[str, int]:
        ledger = self.ledger
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
        """All series in the Prometheus text format."""
        self.dispatcher.sync_engine_leases()
        m, states = self.metrics, self.owners()
        engine = self._engine_states()

        def each(key: str) -> Mapping[str, float]:
            return {owner: state[key] for owner, state in states.items()}

        return m.exposition(
            {
                m.config_version: self.dispatcher.config_version,
                m.quota_bytes: each("quota_bytes"),
                m.held_bytes: each("held_bytes"),
                m.deficit_bytes: each("deficit_bytes"),
                m.predicted_lease_bytes: each("reserved_bytes"),
                m.running: each("running"),
                m.waiting: each("waiting"),
                m.used_bytes: {owner: state.used_bytes for owner, state in engine.items()},
                m.balloon_bytes: {owner: state.ceded_bytes for owner, state in engine.items()},
                m.engine_running: {owner: state.running for owner, state in engine.items()},
                m.engine_waiting: {owner: state.waiting for owner, state in engine.items()},
                **calibration_readings(self.lengths, m),
                **({} if self.quota_controller is None else self.quota_controller.readings(m)),
                **self.dispatcher.ttft.readings(m),
                **({} if self.monitor is None else self.monitor.readings(m)),
                m.device_seconds: {owner.value: busy for owner, busy in m.device_time.items()},
                **({} if self.decision_log is None else self.decision_log.readings(m)),
                m.stall_count: {
                    Owner.LLM: sum(generator.stall_count for generator in self.generators.values()),
                    Owner.EMBEDDING: sum(embedder.stall_count for embedder in self.embedders.values()),
                },
                m.engine_restarts: sum(supervisor.restarts for supervisor in self.supervisors.values()),
                m.restarts: sum(embedder.restarts for embedder in self.embedders.values()),
                m.out_of_memory: sum(embedder.out_of_memory for embedder in self.embedders.values()),
                m.engine_preemptions: {owner: state.preemptions for owner, state in engine.items()},
                m.engine_recompute_tokens: {
                    owner: state.recompute_tokens
                    for owner, state in engine.items()
                    if state.recompute_tokens is not None
                },
            }
        )

    def _engine_states(self) -> dict[str, EngineState]:
        """The engine's state; empty for a dead engine, whose last state would look alive."""
        try:
            states = [generator.state() for generator in self.generators.values()]
            return {Owner.LLM.value: states[0]} if states else {}
        except BackendDown:
            return {}
