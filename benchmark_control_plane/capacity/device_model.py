"""The simulated device of a configuration: its memory plan, engine limits, and step times.

Step times are given, or follow from a roofline of the device and the models' config.json. The roofline is
linearised like the prior of the engine plug-in, so the simulated engine is the one that the policies predict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.cost_models import roofline
from backends.cost_models.step_time import StepLoad
from backends.vllm.argument_names import batch_defaults
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.system_schema import SimulatedDeviceSection
from controlplane.config import Config
from controlplane.config.models_section import ChatModel, EmbeddingModel
from controlplane.core.kv_geometry import DTYPE_BYTES, GeometryError
from controlplane.service.engine_builders import model_facts
from controlplane.service.memory.memory_plan import MemoryPlan, ModelFacts, parallel_sizes
from controlplane.service.preflight import DeviceFacts, estimated_workspace_bytes, plan_of

# Of a CPU: tokens per step and running requests, where the configuration states none.
_CPU_BATCH = 2_048, 256
# Of a configuration without a chat model, which has no KV cache.
_BLOCK_TOKENS = 16
# Tokens of an input in the batch on which the line of the embedding time is fitted.
_INPUT_TOKENS = 512

StepLine = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The simulated device, tokens of a KV block, and one sentence for each assumption."""

    section: SimulatedDeviceSection
    block_tokens: int
    assumptions: Sequence[str]


def device_model(
    config: Config,
    device: DeviceFacts,
    *,
    step: StepLine | None,
    embedding: tuple[float, float] | None,
    source: str = "--step and --embedding",
) -> DeviceModel:
    """The model of a configuration; `source` says where the stated times are from.

    Raises BadInput if a step time is neither given nor known, ConfigError if a model cannot be read.
    """
    plan = plan_of(config, device)
    chat = config.models.chat
    encoder = config.models.embeddings[0] if config.models.embeddings else None
    if chat is None and encoder is None:
        raise BadInput("models: neither chat nor embeddings; the capacity of rerankers alone is not modelled")
    assumptions = [_memory_text(config, plan)]
    if (step is None and chat is not None) or (embedding is None and encoder is not None):
        at = _rooflined(device, None if chat is None else chat.engine.get("dtype"))
        assumptions.append(
            f"Step times are those of a roofline of {device.text}, not measured; give --step and --embedding."
        )
        if step is None and chat is not None:
            step = _step_line(at, chat, plan)
        if embedding is None and encoder is not None:
            embedding = _embedding_line(at, encoder)
    else:
        assumptions.append(f"Step times are those of {source}.")
    if len(config.models.encoders) > 1 and encoder is not None:
        assumptions.append(f"All embeddings run on {encoder.served_name}; rerankers are not simulated.")
    section = SimulatedDeviceSection(
        embedding=embedding or (0.0, 0.0),
        pool=None if config.static_quota_reason() else plan.pool_bytes,
        **({} if encoder is None else _encoder(encoder)),
        **({} if chat is None or step is None else _engine(chat, plan, step, device)),
    )
    block = _BLOCK_TOKENS if plan.geometry is None else plan.geometry.block_tokens
    return DeviceModel(section, block, assumptions)


def _engine(chat: ChatModel, plan: MemoryPlan, step: StepLine, device: DeviceFacts) -> Mapping[str, Any]:
    assert plan.geometry is not None
    tokens, sequences = batch_defaults(device.text, device.memory_bytes) if device.is_gpu else _CPU_BATCH
    return {
        "step": step,
        "kv_memory": plan.kv_bytes,
        "kv_bytes_per_token": plan.geometry.bytes_per_token,
        "max_model_tokens": plan.max_model_tokens,
        "max_running": int(chat.engine.get("max_num_seqs") or sequences),
        "step_tokens": int(chat.engine.get("max_num_batched_tokens") or tokens),
        "prefix_cache": chat.engine.get("enable_prefix_caching", True) is not False,
    }


def _memory_text(config: Config, plan: MemoryPlan) -> str:
    moves = "quotas are static" if config.static_quota_reason() else "quotas move"
    return (
        f"KV cache {plan.kv_bytes / 2**30:.2f} GiB of a pool of {plan.pool_bytes / 2**30:.2f} GiB; {moves}."
    )


def _rooflined(device: DeviceFacts, dtype: object) -> roofline.Device:
    """The device's roofline, of a CPU measured in some tens of milliseconds with this type of numbers."""
    if device.roofline is not None:
        return device.roofline
    if device.is_gpu:
        raise BadInput(
            f"the roofline of {device.text} is not known; give --step and --embedding, or a known --device"
        )
    try:
        return roofline.measure_cpu(str(dtype or "bfloat16"))
    except (ImportError, AttributeError) as error:
        raise BadInput(f"the CPU cannot be measured ({error}); give --step and --embedding") from error


def _step_line(device: roofline.Device, chat: ChatModel, plan: MemoryPlan) -> StepLine:
    assert plan.geometry is not None
    facts = model_facts(chat.model)
    dtype = str(chat.engine.get("dtype") or "auto")
    stated = dtype if dtype in DTYPE_BYTES else "bfloat16"
    tensor, pipeline = parallel_sizes(chat.engine)
    # A step passes through all stages of a pipeline, one after the other.
    costs = _costs(
        facts, plan.geometry.bytes_per_token * pipeline,
        roofline.bytes_per_weight(facts.config, stated), tensor,
    )  # fmt: skip
    cost = roofline.step_cost(roofline.roofline(device, costs))
    return cost.step, cost.prompt_token, cost.decode, cost.cell


def _embedding_line(device: roofline.Device, encoder: EmbeddingModel) -> tuple[float, float]:
    facts = model_facts(encoder.model)
    costs = _costs(facts, 0, DTYPE_BYTES[encoder.dtype or "float32"], 1)
    seconds = roofline.roofline(device, costs, costs)
    length = min(_INPUT_TOKENS, facts.context_tokens)
    inputs = max(2, encoder.batch_tokens // length)
    one, many = seconds(StepLoad(inputs=1, length=length)), seconds(StepLoad(inputs=inputs, length=length))
    per_token = (many - one) / ((inputs - 1) * length)
    return max(one - per_token * length, 0.0), per_token


def _costs(facts: ModelFacts, cell_bytes: int, weight_bytes: float, ranks: int) -> roofline.ModelCosts:
    try:
        return roofline.model_costs(
            facts.config, cell_bytes, bytes_per_weight=weight_bytes, tensor_parallel=ranks
        )
    except GeometryError as error:
        raise BadInput(f"{error}; or give --step and --embedding") from error


def _encoder(encoder: EmbeddingModel) -> Mapping[str, Any]:
    facts = model_facts(encoder.model)
    longest = encoder.max_input_tokens or facts.context_tokens
    workspace = estimated_workspace_bytes(
        facts,
        batch_tokens=encoder.batch_tokens,
        max_input_tokens=longest,
        bytes_per_element=DTYPE_BYTES[encoder.dtype or "float32"],
    )
    return {
        # An input longer than a batch is computed alone.
        "embed_batch_tokens": max(encoder.batch_tokens, longest),
        "embed_input_tokens": longest,
        "embed_bytes_per_token": max(1, workspace // max(encoder.batch_tokens, longest)),
        "workspace_batches": 1,
    }
