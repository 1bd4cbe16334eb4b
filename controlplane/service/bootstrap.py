"""Builds a service from its configuration: backends, gate, quotas and monitor. Starts nothing.

Backends are looked up by name in the tables of `engine_builders`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from backends.device import probe as device_probe
from backends.device.kv_memory import KvcachedMemory, kvcached_segment, kvcached_unit
from controlplane.config import Config, ConfigError
from controlplane.config.active_mechanisms import mechanisms, unused_keys
from controlplane.core.clock import Clock
from controlplane.core.device import DeviceMemory
from controlplane.core.ports import Embedder, Generator, LengthPredictor, Reranker
from controlplane.core.request import Kind
from controlplane.metrics import Metrics
from controlplane.service.decision_log.decision_log import DecisionLog, decision_log_of
from controlplane.service.decision_log.machine_facts import machine_facts
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.engine_builders import (
    embedders_of,
    encoder_of,
    generators_of,
    length_predictor_of,
    rerankers_of,
    worker_needs,
)
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.intake import intake_of
from controlplane.service.gate.load_reporter import require_small_reports
from controlplane.service.gate.policies import Policies, policies_of
from controlplane.service.gate.rate_limits import RateLimiter
from controlplane.service.gate.start_timeouts import StartTimeouts
from controlplane.service.memory.memory_plan import MemoryPlan, plan_text
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.pool import ledger_of, shared_pool
from controlplane.service.memory.quota_controller import quota_controller
from controlplane.service.memory.worker_reserve import PoolReserve, WorkerReserve, WorkspaceQuota
from controlplane.service.prediction.backend_observer import BackendObserver
from controlplane.service.prediction.fail_open import FailOpen, GuardedLengthPredictor
from controlplane.service.prediction.length_training import LengthTraining, require_writable_file
from controlplane.service.preflight import plan_of
from controlplane.service.reconfiguration import Reconfiguration
from controlplane.service.request_recorder import RequestRecorder
from controlplane.service.runtime.engine_control import EngineConfigurator
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.runtime.timers import MonotonicClock, PeriodicTimer, SchedulerTimer
from controlplane.service.service import Parts, Service
from controlplane.service.status import ServiceStatus
from controlplane.service.tracing.trace_export import TraceExport, require_exporter
from controlplane.service.worker_replacement import WorkerBuilder, WorkerReplacement
from predictors.output_length.learned_predictor import LearnedLengths

log = logging.getLogger(__name__)


def kvcached_memory(plan: MemoryPlan) -> DeviceMemory:
    """The memory that kvcached maps on demand; called once the engine runs. Raises ConfigError."""
    try:
        segment = kvcached_segment()
        return KvcachedMemory(segment, pool_bytes=plan.pool_bytes, unit_bytes=kvcached_unit(plan.chat_layers))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def monitor_of(plan: MemoryPlan, *, is_static: bool) -> Callable[[Callable[[int], None]], MemoryMonitor]:
    """A function that builds the memory monitor, given the function to call with the withheld bytes.

    After the start our processes may hold the pool and one forward pass more than the baseline, but not a KV
    cache that the baseline includes. Half the margin is the tolerated disagreement.
    """

    def build(withhold: Callable[[int], None]) -> MemoryMonitor:
        probe = device_probe.open_probe()
        has_cache = is_static and probe.counts_reserved_memory
        granted = plan.pool_bytes + plan.activation_bytes - (plan.kv_bytes if has_cache else 0)
        return MemoryMonitor(probe, lambda: granted, withhold, plan.margin_bytes // 2)

    return build


def assemble(config: Config) -> Service:
    """The service of a configuration, not started. Raises ConfigError."""
    require_writable_file(config)
    began = time.monotonic()
    plan, is_static = plan_of(config), config.pool.kv_allocator == "static"
    log.info("the memory plan, made in %.1f s:\n%s", time.monotonic() - began, plan_text(plan))
    log.info("mechanisms:\n  %s", "\n  ".join(map(str, mechanisms(config))))
    for line in unused_keys(config):
        log.warning("%s", line)
    return build_service(
        config,
        generators_of(config, plan),
        embedders_of(config),
        rerankers=rerankers_of(config),
        workspace_bytes=plan.workspace_bytes,
        device_memory=None if is_static else lambda: kvcached_memory(plan),
        monitor=monitor_of(plan, is_static=is_static) if config.pool.monitor_ms else None,
        worker_builder=WorkerBuilder(encoder_of, worker_needs),
    )


def build_service(
    config: Config,
    generators: Sequence[Generator],
    embedders: Sequence[Embedder],
    *,
    workspace_bytes: int,
    rerankers: Sequence[Reranker] = (),
    device_memory: Callable[[], DeviceMemory] | None = None,
    monitor: Callable[[Callable[[int], None]], MemoryMonitor] | None = None,
    clock: Clock | None = None,
    ticks: PeriodicTimer | None = None,
    lengths: LengthPredictor | None = None,
    worker_builder: WorkerBuilder | None = None,
) -> Service:
    """The service of these backends, not started.

    Args:
        config: the whole configuration.
        generators: LLM engines, not started.
        embedders: embedding engines, not started.
        workspace_bytes: quota of all embedding models and rerankers where no quota moves.
        rerankers: reranking engines, not started.
        device_memory: called once the backends run; without it the quotas are static.
        monitor: builds the memory monitor, given what to call when the withheld bytes change.
        clock: another clock than the host's; then nothing is trained or sampled in the background.
        ticks: runs the quota ticks.
        lengths: replaces the length predictor that the configuration names.
        worker_builder: builds embedders and rerankers that a change adds; without it they need a restart.

    Raises ConfigError if `tracing.endpoint` is named without the extra `otel`.
    """
    require_exporter(config.tracing)
    predictor = lengths or length_predictor_of(config)
    encoders = EncoderRegistry(embedders, rerankers)
    replacement = None if worker_builder is None else WorkerReplacement(config, encoders, worker_builder)
    kinds = [kind for kind, served in ((Kind.GENERATE, generators), (Kind.EMBED, encoders)) if served]
    metrics = Metrics(config.service_classes().values(), kinds)
    restart = None if config.models.chat is None else config.models.chat.restart
    supervisors = {generator.model: EngineSupervisor(generator, restart) for generator in generators}
    build = partial(
        _parts, config, supervisors, encoders, replacement, device_memory, workspace_bytes, monitor,
        clock or MonotonicClock(), predictor, metrics,
    )  # fmt: skip
    return Service(
        list(supervisors.values()),
        encoders,
        build,
        reconfiguration=_reconfiguration(config, generators, replacement),
        metrics=metrics,
        timer=ticks or SchedulerTimer(),
        training=_training_of(config, predictor) if clock is None else None,
        is_sampled=clock is None,
    )


def _reconfiguration(
    config: Config, generators: Sequence[Generator], replacement: WorkerReplacement | None
) -> Reconfiguration:
    def prepared(changed: Config, number: int) -> Policies:
        require_exporter(changed.tracing)
        require_small_reports(
            changed,
            [generator.model for generator in generators],
            [model.served_name for model in changed.models.encoders],
        )
        return policies_of(changed, generators, version=number)

    return Reconfiguration(
        config,
        prepared,
        EngineConfigurator([g for g in generators if g.has_tandem_scheduler], config.engine_options()),
        replacement,
    )


def _training_of(config: Config, predictor: LengthPredictor) -> LengthTraining | None:
    if not isinstance(predictor, LearnedLengths):
        return None
    section = config.predictors
    return LengthTraining(predictor, every_seconds=section.train_every_ms / 1_000, file=section.file)


def _parts(
    config: Config,
    supervisors: Mapping[str, EngineSupervisor],
    encoders: EncoderRegistry,
    replacement: WorkerReplacement | None,
    device_memory: Callable[[], DeviceMemory] | None,
    workspace_bytes: int,
    make_monitor: Callable[[Callable[[int], None]], MemoryMonitor] | None,
    clock: Clock,
    predictor: LengthPredictor,
    metrics: Metrics,
) -> Parts:
    """Builds what depends on the backends' sizes. Raises ConfigError."""
    generators = {name: supervisor.generator for name, supervisor in supervisors.items()}
    pool = shared_pool(config, generators, encoders, device_memory)
    ledger = ledger_of(pool, generators, encoders, workspace_bytes)
    policies, fail_open = policies_of(config, generators.values()), FailOpen(metrics)
    rates, lengths = RateLimiter(policies.tenant_limits), GuardedLengthPredictor(predictor, fail_open)
    dispatcher = Dispatcher(
        clock, ledger, policies, generators, encoders, lengths, metrics, rates,
        TenantQueues(policies.tenant_weights), RequestRecorder(clock, remembered=policies.explained_requests),
    )  # fmt: skip
    observer = BackendObserver(
        clock, dispatcher.pace_estimators, dispatcher.pause_cost, encoders, metrics, fail_open
    )
    observer.attach(generators)
    timeouts = StartTimeouts(dispatcher, clock, policies.admission.options.max_wait)
    gate = Gate(clock, dispatcher, generators, encoders, lengths, rates, supervisors, timeouts)
    intake = intake_of(config, clock, generators, encoders, fail_open, gate.charge, predictor)
    quotas = None if pool is None else quota_controller(pool, config, clock, dispatcher, encoders)
    reserve: WorkerReserve
    if quotas is None:
        reserve = WorkspaceQuota(encoders, dispatcher)
    else:
        reserve, gate.on_arrival = PoolReserve(quotas), quotas.observe_arrival
    if replacement is not None:
        replacement.attach(reserve, dispatcher.decide)
    monitor = None if make_monitor is None else make_monitor(reserve.withhold)
    if monitor is not None:
        monitor.allocated = lambda: sum(worker.allocator_bytes for worker in encoders.running)
    pool_bytes = None if pool is None else pool.memory.pool_bytes
    machine = partial(
        machine_facts, generators, encoders, pool_bytes=pool_bytes, workspace_bytes=workspace_bytes
    )
    decision_log = decision_log_of(config, machine, encoders, clock)
    traces = TraceExport(clock)
    _record(dispatcher, observer, decision_log, traces)
    status = ServiceStatus(
        config, supervisors, encoders, metrics, ledger, dispatcher, predictor, fail_open, quotas, monitor,
        decision_log, traces,
    )  # fmt: skip
    return Parts(gate, intake, status, quotas, monitor)


def _record(
    dispatcher: Dispatcher,
    observer: BackendObserver,
    decision_log: DecisionLog | None,
    traces: TraceExport,
) -> None:
    """Has ended requests and embedding passes recorded by what is configured."""
    if decision_log is not None:
        dispatcher.accounting.on_end.append(decision_log.record_request)
        observer.on_pass.append(decision_log.observe_pass)
    dispatcher.accounting.on_end.append(traces.request_ended)
    observer.on_pass.append(lambda _, done: traces.pass_ended(done))
