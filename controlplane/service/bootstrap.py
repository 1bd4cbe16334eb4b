"""Which engines does a configuration ask for? Made here, started by the service."""

from backends.embedding.client import WorkerEmbedder
from backends.vllm.client import VllmGenerator
from controlplane.config import Config
from controlplane.config.models import EmbeddingModel
from controlplane.core.ports import Generator
from controlplane.service.memory.hybrid_cache import hybrid_setup
from controlplane.service.memory.memory_plan import MemoryPlan
from controlplane.service.memory.model_config import facts_of


def generators_of(config: Config, plan: MemoryPlan) -> list[Generator]:
    chat = config.models.chat
    if chat is None:
        return []
    scheduling = config.engine_options()
    # By priority vLLM's own scheduler orders what was sent ahead, and picks victims, by the gate's rank.
    own = {"scheduling_policy": "priority"} if scheduling is None else {}
    return [
        VllmGenerator(
            chat.model,
            served_name=chat.served_name,
            engine_arguments={"kv_cache_memory_bytes": plan.kv_bytes, **own, **chat.engine},
            tool_parser=chat.tool_parser,
            reasoning_parser=chat.reasoning_parser,
            scheduling=scheduling,
            hybrid=hybrid_setup(config, facts_of),
            stall_seconds=chat.stall_ms / 1_000,
        )
    ]


def embedders_of(config: Config) -> list[WorkerEmbedder]:
    models = config.models
    # Where no quota moves, a budget falls only for a device that has less than was planned.
    returns_memory = config.pool.device_memory == "kvcached" or not config.quota.moves
    return [
        embedder_of(
            model,
            yields_cpu=model.yields_cpu if model.yields_cpu is not None else models.chat is not None,
            returns_memory=returns_memory,
        )
        for model in models.embeddings
    ]


def embedder_of(
    model: EmbeddingModel, *, yields_cpu: bool = False, returns_memory: bool = False
) -> WorkerEmbedder:
    return WorkerEmbedder(
        model.model,
        served_name=model.served_name,
        batch_tokens=model.batch_tokens,
        max_running=model.max_running,
        device=model.device,
        dtype=model.dtype,
        normalize=model.normalize,
        max_input_tokens=model.max_input_tokens,
        dimensions=model.dimensions,
        threads=model.threads,
        yields_cpu=yields_cpu,
        trust_remote_code=model.trust_remote_code,
        stall_seconds=model.stall_ms / 1_000,
        returns_memory=returns_memory,
    )
