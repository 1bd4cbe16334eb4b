"""Builds what a configuration names: the LLM, embedding models, rerankers and the length predictor.

A backend is imported where it is built: `tandem check` only resolves its name.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from backends import bundled_models
from backends.embedding import memory_model
from backends.vllm.grammar_limits import GrammarLimits
from backends.vllm.hybrid import support as hybrid_support
from backends.vllm.hybrid.support import HybridSetup
from controlplane.config import Config, ConfigError
from controlplane.config.models_section import ChatModel, EmbeddingModel, WorkerModel
from controlplane.core.kv_geometry import DTYPE_BYTES
from controlplane.core.ports import Embedder, Generator, LengthPredictor, Reranker
from controlplane.policy.registry import lookup
from controlplane.service.memory import memory_plan, model_config
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts

if TYPE_CHECKING:
    from backends.embedding.client import WorkerEmbedder
    from controlplane.service.worker_replacement import WorkerNeeds


def model_facts(name: str) -> ModelFacts:
    """Config and weight sizes of a model, also of a bundled one that has not been built.

    Raises ConfigError naming what is missing.
    """
    if (tiny := bundled_models.tiny_model(name)) is not None:
        return ModelFacts(tiny.config, tiny.weight_bytes)
    return model_config.model_facts(model_folder(name))


def model_folder(name: str) -> str:
    """Folder of a bundled model, built if there is none; any other name is returned unchanged.

    Raises ConfigError.
    """
    try:
        return bundled_models.resolve(name)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"models: {error}") from error


def generators_of(config: Config, plan: MemoryPlan) -> list[Generator]:
    """The LLM engines of a configuration, not started."""
    chat = config.models.chat
    if chat is None:
        return []
    backend = lookup("generator", LLM_BACKENDS, chat.backend, setting="models.chat.backend")
    return [backend(config, chat, plan)]


def vllm_generator(config: Config, chat: ChatModel, plan: MemoryPlan) -> Generator:
    """An AsyncLLM engine of vLLM, with Tandem's scheduler plug-in unless `scheduling.engine` is `off`."""
    from backends.vllm.client import VllmGenerator

    scheduling = config.engine_options()
    # With its priority policy vLLM's own scheduler orders the forwarded requests, and picks victims, by the
    # gate's rank.
    own = {"scheduling_policy": "priority"} if scheduling is None else {}
    hybrid = memory_plan.hybrid_choice(config, model_facts, hybrid_support)
    return VllmGenerator(
        model_folder(chat.model),
        served_name=chat.served_name,
        engine_arguments={"kv_cache_memory_bytes": plan.kv_bytes, **own, **chat.engine},
        lora_modules=chat.lora_modules,
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
    return [encoder_of(config, model) for model in config.models.embeddings]


def rerankers_of(config: Config) -> list[Reranker]:
    """The rerankers of a configuration, not started."""
    return [worker_embedder(config, model) for model in config.models.rerankers]


def encoder_of(config: Config, model: WorkerModel) -> Embedder:
    """The engine of an embedding model or a reranker, not started. Raises ConfigError."""
    if not isinstance(model, EmbeddingModel):
        return worker_embedder(config, model)
    try:
        backend = lookup("embedder", EMBEDDING_BACKENDS, model.backend, setting="models.embeddings.backend")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return backend(config, model)


async def worker_needs(model: WorkerModel) -> "WorkerNeeds":
    """The weights of a worker as the memory plan counts them, and a prior of its passes. Raises ConfigError.

    The prior does not know on how many lanes the worker computes; what it measures is checked once it has
    loaded.
    """
    from controlplane.service.worker_replacement import WorkerNeeds

    # Built here, a model does not hold up the event loop when its worker is built.
    await asyncio.to_thread(model_folder, model.model)
    facts = await asyncio.to_thread(model_facts, model.model)
    element = DTYPE_BYTES["float32" if model.dtype is None else model.dtype]
    memory = memory_model.prior(facts.config, bytes_per_element=element)
    workspace = memory.workspace_bytes(
        budget_tokens=model.batch_tokens, max_input_tokens=model.max_input_tokens or 0
    )
    return WorkerNeeds(facts.loaded_bytes(model.dtype), workspace)


def worker_embedder(config: Config, model: WorkerModel) -> "WorkerEmbedder":
    """sentence-transformers in a worker process; `config` decides CPU priority and allocator."""
    has_chat, idle = config.models.chat is not None, model.idle_cpu_priority
    return embedder_of(
        model,
        idle_cpu_priority=has_chat if idle is None else idle,
        environment=model.mps_environment(has_chat=has_chat),
        # A budget is reduced for the LLM, or when the device has less memory than planned; then the allocator
        # must return it.
        returns_memory=True,
    )


def embedder_of(
    model: WorkerModel,
    *,
    idle_cpu_priority: bool = False,
    environment: Mapping[str, str] | None = None,
    returns_memory: bool = False,
) -> "WorkerEmbedder":
    """sentence-transformers in a worker process of its own."""
    from backends.embedding.client import WorkerEmbedder

    own: dict[str, Any] = {"scores_pairs": True}
    if isinstance(model, EmbeddingModel):
        own = {"normalize": model.normalize, "dimensions": model.dimensions}
    return WorkerEmbedder(
        model_folder(model.model),
        served_name=model.served_name,
        batch_tokens=model.batch_tokens,
        max_running=model.max_running,
        device=model.device,
        dtype=model.dtype,
        max_input_tokens=model.max_input_tokens,
        threads=model.threads,
        idle_cpu_priority=idle_cpu_priority,
        environment=environment,
        trust_remote_code=model.trust_remote_code,
        stall_seconds=model.stall_ms / 1_000,
        returns_memory=returns_memory,
        **own,
    )


def length_predictor_of(config: Config) -> LengthPredictor:
    """The predictor that `admission.length_predictor` names."""
    name = config.admission.length_predictor
    return lookup("length_predictor", LENGTH_PREDICTORS, name, setting="admission.length_predictor")(config)


def _learned_lengths(config: Config) -> LengthPredictor:
    from predictors.output_length.learned_predictor import LearnedLengths

    return LearnedLengths(max_examples=config.predictors.max_examples)


def _length_history(config: Config) -> LengthPredictor:
    from predictors.output_length.history_predictor import HistoryQuantiles

    return HistoryQuantiles()


def _token_limits(config: Config) -> LengthPredictor:
    from predictors.output_length.history_predictor import MaxTokens

    return MaxTokens()


LLM_BACKENDS: Mapping[str, Callable[[Config, ChatModel, MemoryPlan], Generator]] = {"vllm": vllm_generator}
EMBEDDING_BACKENDS: Mapping[str, Callable[[Config, EmbeddingModel], Embedder]] = {
    "sentence-transformers": worker_embedder,
}
LENGTH_PREDICTORS: Mapping[str, Callable[[Config], LengthPredictor]] = {
    "learned": _learned_lengths,
    "history": _length_history,
    "max-tokens": _token_limits,
}
