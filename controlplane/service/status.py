"""Reports state, served models, metrics and impaired parts of the service."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from controlplane.config import Config
from controlplane.core.clock import Instant, between, seconds
from controlplane.core.engine_reports import EngineState
from controlplane.core.errors import BackendDown
from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import LengthPredictor
from controlplane.core.request import Kind, Owner
from controlplane.metrics import Metrics
from controlplane.service.decision_log.decision_log import DecisionLog
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.gate.load_reporter import LoadReporter
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.quota_controller import QuotaController
from controlplane.service.memory.quota_report import quota_readings, quota_state
from controlplane.service.prediction.fail_open import FailOpen
from controlplane.service.prediction.length_training import calibration_readings
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.runtime.health_tracker import Fault, HealthTracker
from controlplane.service.tracing.trace_export import TraceExport

# A server at its limit sheds in bursts.
_SHED_SHOWN = seconds(60)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One served model.

    `kind` is generate, embed or rerank; `root` is the model's path or its name on the hub. A LoRA adapter has
    the name of its model as `parent`.
    """

    id: str
    kind: str
    max_model_len: int
    root: str
    parent: str | None = None


@dataclass(eq=False)
class ServiceStatus:
    """Reads the parts of a started service; changes nothing but the engine leases, which it syncs first.

    `config` is the configuration in force.
    """

    config: Config
    supervisors: Mapping[str, EngineSupervisor]
    encoders: EncoderRegistry
    metrics: Metrics
    ledger: MemoryLedger
    dispatcher: Dispatcher
    lengths: LengthPredictor
    fail_open: FailOpen
    quota_controller: QuotaController | None
    monitor: MemoryMonitor | None
    decision_log: DecisionLog | None
    traces: TraceExport

    def __post_init__(self) -> None:
        self.generators = {name: each.generator for name, each in self.supervisors.items()}
        self._clock = self.dispatcher.recorder.records.clock
        self._shed_at: Instant | None = None
        self.load_reporter: LoadReporter | None = None

    def count_shed(self, kind: Kind) -> None:
        """Counts a request that was rejected before it was parsed."""
        self.metrics.count_shed(kind)
        self._shed_at = self._clock.now()

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
        """The parts that fail now, each in words: engines and workers that are down, those of `impaired`.

        And `overload` for a minute after a request was rejected before it was parsed.
        """
        down = {f"engine {name}": each.to_json()["down"] for name, each in self.supervisors.items()}
        down |= {f"worker {name}": each.down for name, each in self.encoders.items()}
        found = {name: str(reason) for name, reason in down.items() if reason is not None}
        found |= {name: text for name, each in self._health().items() if (text := each.text()) is not None}
        if self.monitor is not None and self.monitor.withheld:
            found["memory"] = (
                f"{self.monitor.withheld:,} bytes are withheld from the quotas, because the device has less "
                "free memory than was planned"
            )
        if self._shed_at is not None and between(self._shed_at, self._clock.now()) < _SHED_SHOWN:
            found["overload"] = (
                "the event loop is late or large requests take server.limits.body_memory, and requests are "
                "rejected before the gate; they are in no class, and tandem_requests_shed_total counts them"
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
            "tracing": self.traces.active,
            "load_report": self.load_reporter,
        }
        return {name: work.health for name, work in repeated.items() if work is not None}

    def models(self) -> list[ModelCard]:
        """All served models, and the adapters of the chat model."""
        roots = {model.served_name: model.model for model in self.config.models.all()}
        sizes = {g.model: ("generate", g.max_model_tokens) for g in self.generators.values()}
        sizes |= {
            e.model: ("rerank" if e.model in self.encoders.rerankers else "embed", e.max_input_tokens)
            for e in self.encoders.values()
        }
        cards = [ModelCard(model, kind, size, roots[model]) for model, (kind, size) in sizes.items()]
        if (chat := self.config.models.chat) is not None:
            cards += [
                ModelCard(name, *sizes[chat.served_name], root, parent=chat.served_name)
                for name, root in chat.lora_modules.items()
            ]
        return cards

    def context_tokens(self) -> int:
        """The longest context of a chat model; 0 without one."""
        return max((generator.max_model_tokens for generator in self.generators.values()), default=0)

    def state(self) -> dict[str, object]:
        """Memory, quotas and requests, for the operator."""
        self.dispatcher.sync_engine_leases()
        return {
            "engines": {name: supervisor.to_json() for name, supervisor in self.supervisors.items()},
            "owners": self.owners(),
            "device": None if self.monitor is None else self.monitor.to_json(),
            "sharing": None if self.quota_controller is None else quota_state(self.quota_controller),
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
            "quota_bytes": ledger.quota(owner),
            "held_bytes": ledger.held(owner),
            "deficit_bytes": ledger.deficit(owner),
            "reserved_bytes": leases.final_bytes,
            "running": len(leases),
            "waiting": len(self.dispatcher.queued(owner)),
        }

    def metrics_text(self, utilisation: float | None, *, has_vllm_names: bool) -> bytes:
        """All series in the Prometheus text format; with `has_vllm_names` also those under vLLM's names.

        A `utilisation` that is not known is left out.
        """
        self.dispatcher.sync_engine_leases()
        m, states, workers = self.metrics, self.owners(), self.encoders.counts
        engine = self._engine_states()

        def each(key: str) -> Mapping[str, float]:
            return {owner: state[key] for owner, state in states.items()}

        chat = next(iter(self.generators.values()), None) if has_vllm_names else None
        return m.exposition(
            {
                **({} if utilisation is None else {m.predicted_utilisation: utilisation}),
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
                **({} if self.quota_controller is None else quota_readings(self.quota_controller, m)),
                **self.dispatcher.ttft.readings(m),
                **({} if self.monitor is None else self.monitor.readings(m)),
                m.device_seconds: {owner.value: busy for owner, busy in m.device_time.items()},
                m.device_handover: m.handover_time,
                **({} if self.decision_log is None else self.decision_log.readings(m)),
                **({} if (tracer := self.traces.tracer) is None else tracer.readings(m)),
                m.engine_stalls: {
                    Owner.LLM: sum(generator.stall_count for generator in self.generators.values()),
                    Owner.EMBEDDING: workers.stalls,
                },
                m.engine_restarts: sum(supervisor.restarts for supervisor in self.supervisors.values()),
                m.embedding_restarts: workers.restarts,
                m.out_of_memory: workers.out_of_memory,
                m.engine_preemptions: {owner: state.preemptions for owner, state in engine.items()},
                m.engine_recompute_tokens: {
                    owner: state.recompute_tokens
                    for owner, state in engine.items()
                    if state.recompute_tokens is not None
                },
            },
            None if chat is None else (chat.model, chat.geometry),
        )

    def _engine_states(self) -> dict[str, EngineState]:
        """The engine's state; empty for a dead engine, whose last state no longer holds."""
        with suppress(BackendDown):
            for generator in self.generators.values():
                return {Owner.LLM.value: generator.state()}
        return {}
