"""Builds a service from its configuration: backends, gate, quotas and monitor. Starts nothing.

The only module outside `backends` that imports it. Backends are looked up by name in the tables below.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from backends import bundled_models
from backends.device import probe as device_probe
from backends.device.kv_memory import KvcachedMemory, kvcached_segment, kvcached_unit
from backends.embedding.client import WorkerEmbedder
from backends.vllm.argument_names import check_arguments, with_tandem_scheduler
from backends.vllm.client import VllmGenerator
from backends.vllm.grammar_limits import GrammarLimits
from backends.vllm.hybrid import support as hybrid_support
from backends.vllm.hybrid.support import HybridSetup
from controlplane.config import Config, ConfigError
from controlplane.config.active_mechanisms import mechanisms, unused_keys
from controlplane.config.models_section import ChatModel, EmbeddingModel, WorkerModel
from controlplane.core.clock import Clock
from controlplane.core.device import DeviceMemory
from controlplane.core.memory_ledger import MemoryLedger, Quota
from controlplane.core.ports import Embedder, Generator, LengthPredictor, Reranker
from controlplane.core.request import Kind
from controlplane.metrics import Metrics
from controlplane.policy.registry import lookup
from controlplane.service.decision_log.decision_log import decision_log_of
from controlplane.service.decision_log.machine_facts import machine_facts
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.gate.engine_outage import EngineOutages
from controlplane.service.gate.fair_queueing import TenantQueues
from controlplane.service.gate.gate import Gate
from controlplane.service.gate.intake import intake_of
from controlplane.service.gate.policies import policies_of
from controlplane.service.gate.rate_limits import RateLimiter
from controlplane.service.memory import memory_plan, model_config
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts, plan_text
from controlplane.service.memory.monitor import MemoryMonitor
from controlplane.service.memory.pool import fixed_shares, shared_pool, withhold_workspace
from controlplane.service.memory.quota_controller import QuotaController, quota_controller
from controlplane.service.prediction.fail_open import FailOpen, GuardedLengthPredictor
from controlplane.service.prediction.length_training import (
    LENGTH_PREDICTORS,
    LengthTraining,
    length_predictor_of,
    require_writable_file,
)
from controlplane.service.prediction.rate_observer import RateObserver
from controlplane.service.reconfiguration import Reconfiguration
from controlplane.service.request_recorder import RequestRecorder
from controlplane.service.runtime.engine_control import EngineConfigurator
from controlplane.service.runtime.engine_supervisor import EngineSupervisor
from controlplane.service.runtime.timers import MonotonicClock, PeriodicTimer, SchedulerTimer
from controlplane.service.service import Parts, Service
from controlplane.service.status import ServiceStatus
from predictors.output_length.learned_predictor import LearnedLengths

log = logging.getLogger(__name__)


def generators_of(config: Config, plan: MemoryPlan) -> list[Generator]:
    """The LLM engines of a configuration, not started."""
    chat = config.models.chat
    if chat is None:
        return []
    backend = lookup("generator", LLM_BACKENDS, chat.backend, setting="models.chat.backend")
    return [backend(config, chat, plan)]


def vllm_generator(config: Config, chat: ChatModel, plan: MemoryPlan) -> Generator:
    """An AsyncLLM engine of vLLM, with Tandem's scheduler plug-in unless `scheduling.engine` is `off`."""
    scheduling = config.engine_options()
    # With its priority policy vLLM's own scheduler orders the forwarded requests, and picks victims, by the
    # gate's rank.
    own = {"scheduling_policy": "priority"} if scheduling is None else {}
    hybrid = memory_plan.hybrid_choice(config, model_facts, hybrid_support)
    return VllmGenerator(
        chat.model,
        served_name=chat.served_name,
        engine_arguments={"kv_cache_memory_bytes": plan.kv_bytes, **own, **chat.engine},
        tool_parser=chat.tool_parser,
        tool_strictness=chat.tool_strictness,
        reasoning_parser=chat.reasoning_parser,
        scheduling=scheduling,
        hybrid=None if hybrid is None else HybridSetup(hybrid.architecture, hybrid.forms),
        grammars=_grammar_limits(config),
        stall_seconds=chat.stall_ms / 1_000,
    )


def _grammar_limits(config: Config) -> GrammarLimits:
    """The keys of `server.limits` that an engine applies."""
    section = config.server.limits
    return GrammarLimits(**{key.name: getattr(section, key.name) for key in fields(GrammarLimits)})


def embedders_of(config: Config) -> list[Embedder]:
    """The embedding engines of a configuration, not started."""
    return [
        lookup("embedder", EMBEDDING_BACKENDS, model.backend, setting="models.embeddings.backend")(
            config, model
        )
        for model in config.models.embeddings
    ]


def rerankers_of(config: Config) -> list[Reranker]:
    """The rerankers of a configuration, not started."""
    return [worker_embedder(config, model) for model in config.models.rerankers]


def worker_embedder(config: Config, model: WorkerModel) -> WorkerEmbedder:
    """sentence-transformers in a worker process; `config` decides CPU priority and allocator."""
    idle = model.idle_cpu_priority
    return embedder_of(
        model,
        idle_cpu_priority=config.models.chat is not None if idle is None else idle,
        # A budget is reduced for the LLM, or when the device has less memory than planned; then the allocator
        # must return it.
        returns_memory=True,
    )


def embedder_of(
    model: WorkerModel, *, idle_cpu_priority: bool = False, returns_memory: bool = False
) -> WorkerEmbedder:
    """sentence-transformers in a worker process of its own."""
    own: dict[str, Any] = {"scores_pairs": True}
    if isinstance(model, EmbeddingModel):
        own = {"normalize": model.normalize, "dimensions": model.dimensions}
    return WorkerEmbedder(
        model.model,
        served_name=model.served_name,
        batch_tokens=model.batch_tokens,
        max_running=model.max_running,
        device=model.device,
        dtype=model.dtype,
        max_input_tokens=model.max_input_tokens,
        threads=model.threads,
        idle_cpu_priority=idle_cpu_priority,
        trust_remote_code=model.trust_remote_code,
        stall_seconds=model.stall_ms / 1_000,
        returns_memory=returns_memory,
        **own,
    )


LLM_BACKENDS: Mapping[str, Callable[[Config, ChatModel, MemoryPlan], Generator]] = {"vllm": vllm_generator}
EMBEDDING_BACKENDS: Mapping[str, Callable[[Config, EmbeddingModel], Embedder]] = {
    "sentence-transformers": worker_embedder,
}


def _check_names(config: Config) -> None:
    """Resolves the backends and the predictor that are named. Raises ValueError for an unknown name."""
    if (chat := config.models.chat) is not None:
        lookup("generator", LLM_BACKENDS, chat.backend, setting="models.chat.backend")
    for model in config.models.embeddings:
        lookup("embedder", EMBEDDING_BACKENDS, model.backend, setting="models.embeddings.backend")
    name = config.admission.length_predictor
    lookup("length_predictor", LENGTH_PREDICTORS, name, setting="admission.length_predictor")


def warn_if_taken(plan: MemoryPlan) -> None:
    """Logs a warning if other processes hold memory of the plan; called before any model is loaded.

    Raises ValueError if the device cannot be read.
    """
    free, needed = device_probe.free_gpu_bytes(), plan.memory_bytes - plan.margin_bytes
    if free is not None and free < needed:
        log.warning(
            "the plan uses up to %s bytes of the device and %s are free now; stop the other processes, or "
            "set pool.memory to the memory that may be used",
            *(f"{needed:,}", f"{free:,}"),
        )


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


def model_facts(name: str) -> ModelFacts:
    """Config and weight sizes of a model. Raises ConfigError naming what is missing."""
    return model_config.model_facts(name, bundled_models.resolve)


def plan_of(config: Config) -> MemoryPlan:
    """The memory plan of a configuration. Raises ConfigError."""
    try:
        _check_names(config)
        plan = memory_plan.memory_plan(config, model_facts, device_probe.memory_bytes, hybrid_support)
        warn_if_taken(plan)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return plan


def hybrid_text(config: Config, plan: MemoryPlan) -> str | None:
    """Text on the memory that hidden states would save; None without a chat model. Raises ConfigError."""
    return memory_plan.hybrid_text(config, model_facts, plan, hybrid_support)


def check_engine_arguments(config: Config) -> None:
    """Checks the names in `models.chat.engine` against the installed vLLM. Raises ConfigError."""
    chat, options = config.models.chat, config.engine_options()
    if chat is None:
        return
    try:
        check_arguments(chat.engine if options is None else with_tandem_scheduler(chat.engine, options))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def assemble(config: Config) -> Service:
    """The service of a configuration, not started. Raises ConfigError."""
    require_writable_file(config)
    plan, is_static = plan_of(config), config.pool.kv_allocator == "static"
    log.info("the memory plan:\n%s", plan_text(plan))
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
    """
    predictor = lengths or length_predictor_of(config)
    workers = [*embedders, *rerankers]
    kinds = [kind for kind, served in ((Kind.GENERATE, generators), (Kind.EMBED, workers)) if served]
    metrics = Metrics(config.service_classes().values(), kinds)
    restart = None if config.models.chat is None else config.models.chat.restart
    supervisors = {generator.model: EngineSupervisor(generator, restart) for generator in generators}
    build = partial(
        _parts,
        config,
        supervisors,
        {worker.model: worker for worker in workers},
        {reranker.model: reranker for reranker in rerankers},
        device_memory,
        workspace_bytes,
        monitor,
        clock or MonotonicClock(),
        predictor,
        metrics,
    )
    configurator = EngineConfigurator([g for g in generators if g.has_own_scheduler], config.engine_options())
    return Service(
        list(supervisors.values()),
        workers,
        build,
        reconfiguration=Reconfiguration(
            config, lambda changed, number: policies_of(changed, generators, version=number), configurator
        ),
        timer=ticks or SchedulerTimer(),
        training=_training_of(config, predictor) if clock is None else None,
        is_sampled=clock is None,
    )


def _training_of(config: Config, predictor: LengthPredictor) -> LengthTraining | None:
    if not isinstance(predictor, LearnedLengths):
        return None
    section = config.predictors
    return LengthTraining(predictor, every_seconds=section.train_every_ms / 1_000, file=section.file)


def _parts(
    config: Config,
    supervisors: Mapping[str, EngineSupervisor],
    embedders: Mapping[str, Embedder],
    rerankers: Mapping[str, Reranker],
    device_memory: Callable[[], DeviceMemory] | None,
    workspace_bytes: int,
    make_monitor: Callable[[Callable[[int], None]], MemoryMonitor] | None,
    clock: Clock,
    predictor: LengthPredictor,
    metrics: Metrics,
) -> Parts:
    """Builds what depends on the backends' sizes; `rerankers` are in `embedders`, too. Raises ConfigError."""
    generators = {name: supervisor.generator for name, supervisor in supervisors.items()}
    pool = shared_pool(config, generators, embedders, device_memory)
    shares = fixed_shares(generators, embedders, workspace_bytes) if pool is None else pool.sharing.nominal
    ledger = MemoryLedger({owner: Quota(share) for owner, share in shares.items()})
    policies, fail_open = policies_of(config, generators.values()), FailOpen(metrics)
    rates, lengths = RateLimiter(policies.tenant_limits), GuardedLengthPredictor(predictor, fail_open)
    dispatcher = Dispatcher(
        clock,
        ledger,
        policies,
        generators,
        embedders,
        lengths,
        metrics,
        rates,
        TenantQueues(policies.tenant_weights),
        RequestRecorder(clock, remembered=policies.explained_requests),
    )
    observer = RateObserver(dispatcher.paces, dispatcher.decode_slack, embedders, metrics, fail_open)
    observer.attach(generators)
    outages = EngineOutages(dispatcher, supervisors)
    gate = Gate(clock, dispatcher, generators, embedders, lengths, rates, outages)
    intake = intake_of(config, clock, generators, embedders, rerankers, fail_open, gate.charge, predictor)
    quotas: QuotaController | None = None
    withhold: Callable[[int], None] = partial(withhold_workspace, list(embedders.values()))
    if pool is not None:
        quotas = quota_controller(pool, config, clock, dispatcher, ledger)
        gate.on_offer, withhold = quotas.observe_arrival, quotas.withhold
    monitor = None if make_monitor is None else make_monitor(withhold)
    if monitor is not None:
        monitor.allocated = lambda: sum(embedder.allocator_bytes for embedder in embedders.values())
    pool_bytes = None if pool is None else pool.memory.pool_bytes
    machine = machine_facts(generators, embedders, pool_bytes=pool_bytes, workspace_bytes=workspace_bytes)
    decision_log = decision_log_of(config, machine, embedders.values(), clock)
    if decision_log is not None:
        dispatcher.accounting.on_end, observer.on_pass = (
            decision_log.record_request,
            decision_log.observe_pass,
        )
    status = ServiceStatus(
        config, supervisors, embedders, metrics, ledger, dispatcher, predictor, fail_open, quotas, monitor,
        decision_log,
    )  # fmt: skip
    return Parts(gate, intake, status, quotas, monitor)
