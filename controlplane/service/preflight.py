"""What can be known about device, models and memory before anything is started: for planning a configuration.

It imports nothing of the running service, whose imports take most of a second. With `bootstrap` and
`engine_builders` the only module of the control plane that imports backends.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from backends.cost_models import roofline
from backends.device import probe
from backends.device.named_devices import named_device
from backends.embedding import cpu_class, memory_model
from backends.vllm.argument_names import batch_defaults, check_arguments, with_tandem_scheduler
from backends.vllm.hybrid import support as hybrid_support
from controlplane.config import Config, ConfigError
from controlplane.core.engine_reports import StepCost
from controlplane.core.kv_geometry import GeometryError
from controlplane.policy.registry import lookup
from controlplane.service.engine_builders import (
    EMBEDDING_BACKENDS,
    LENGTH_PREDICTORS,
    LLM_BACKENDS,
    model_facts,
)
from controlplane.service.memory import memory_plan
from controlplane.service.memory.memory_plan import DeviceDefaults, MemoryPlan, ModelFacts, parallel_sizes

log = logging.getLogger(__name__)

# Default of the CUDA driver for CUDA_MPS_PIPE_DIRECTORY.
_MPS_FOLDER = "/tmp/nvidia-mps"
# Of two processes, a chat model with CUDA graphs and an embedding model.
GPU_RESERVE_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device: its text, bytes of memory, roofline if known, and whether it is a GPU and the one at hand."""

    text: str
    memory_bytes: int
    roofline: roofline.Device | None
    is_gpu: bool
    is_at_hand: bool
    has_bfloat16: bool = True

    def step_cost(self, facts: ModelFacts, kv_bytes_per_token: int) -> StepCost | None:
        """Step cost of a chat model of 16-bit weights; None if figures of device or model are unknown."""
        if self.roofline is None:
            return None
        try:
            costs = roofline.model_costs(facts.config, kv_bytes_per_token)
        except GeometryError:
            return None
        return roofline.step_cost(roofline.roofline(self.roofline, costs))


def device_facts(name: str | None) -> DeviceFacts:
    """The device of a short name, or the one at hand. Raises ConfigError for an unknown name."""
    try:
        if name is not None:
            named = named_device(name)
            return DeviceFacts(
                f"{name}, {named.gigabytes} GB", named.gigabytes * 10**9, named.roofline,
                is_gpu=True, is_at_hand=False, has_bfloat16=named.has_bfloat16,
            )  # fmt: skip
        gpu, memory = probe.gpu_name(), probe.memory_bytes()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    size = f"{memory / 2**30:.1f} GiB"
    if gpu is None:
        return DeviceFacts(f"this host's CPU, {size}", memory, None, is_gpu=False, is_at_hand=True)
    driver_name = gpu.partition(",")[0]
    has_bfloat16 = not any(word in driver_name.split() for word in ("V100", "T4"))
    return DeviceFacts(
        f"{driver_name}, {size}", memory, roofline.gpu_by_name(driver_name),
        is_gpu=True, is_at_hand=True, has_bfloat16=has_bfloat16,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HintFacts:
    """Whether this process may leave the idle class, and whether an MPS server runs at `mps_folder`."""

    may_leave_idle_class: bool
    mps_folder: Path
    has_mps: bool


def hint_facts() -> HintFacts:
    """The scheduling hints that operating system and CUDA driver offer to this process."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER))
    return HintFacts(cpu_class.may_leave_idle_class(), folder, (folder / "control").exists())


def estimated_workspace_bytes(
    facts: ModelFacts, *, batch_tokens: int, max_input_tokens: int, bytes_per_element: int
) -> int:
    """Bytes of a worker's largest pass, estimated from the model's config.json; a started worker measures."""
    prior = memory_model.prior(facts.config, bytes_per_element=bytes_per_element)
    return prior.workspace_bytes(budget_tokens=batch_tokens, max_input_tokens=max_input_tokens)


def plan_of(config: Config, device: DeviceFacts | None = None) -> MemoryPlan:
    """The memory plan of a configuration on `device`, by default the one at hand. Raises ConfigError."""
    named = None if device is None or device.is_at_hand else device
    try:
        _check_names(config)
        if named is not None:
            defaults, size = _gpu_defaults(named.text, named.memory_bytes), named.memory_bytes
            return memory_plan.memory_plan(config, model_facts, lambda: size, hybrid_support, defaults)
        _require_device_per_rank(config)
        plan = memory_plan.memory_plan(
            config, model_facts, probe.memory_bytes, hybrid_support, _device_defaults()
        )
        warn_if_taken(plan)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return plan


def _device_defaults() -> DeviceDefaults:
    """What vLLM takes on the GPU at hand where nothing is stated; without a GPU the bounds of a CPU.

    Raises ValueError if the device cannot be read.
    """
    if (name := probe.gpu_name()) is None:
        return memory_plan.WITHOUT_GPU
    return _gpu_defaults(name, probe.memory_bytes())


def _gpu_defaults(name: str, memory_bytes: int) -> DeviceDefaults:
    step_tokens, sequences = batch_defaults(name, memory_bytes)
    return DeviceDefaults(sequences, step_tokens, GPU_RESERVE_BYTES)


def _require_device_per_rank(config: Config) -> None:
    """Raises ValueError for several ranks that would share a host's memory: the plan gives each a device."""
    chat = config.models.chat
    if chat is None or config.pool.memory != "auto" or probe.gpu_name() is not None:
        return
    if any(size > 1 for size in parallel_sizes(chat.engine)):
        raise ValueError(
            "pool.memory=auto: without a GPU the ranks of models.chat.engine share this host's memory; state "
            "the memory of one rank, or remove tensor_parallel_size and pipeline_parallel_size"
        )


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
    free, needed = probe.free_gpu_bytes(), plan.memory_bytes - plan.margin_bytes
    if free is not None and free < needed:
        log.warning(
            "the plan uses up to %s bytes of the device and %s are free now; stop the other processes, or "
            "set pool.memory to the memory that may be used",
            *(f"{needed:,}", f"{free:,}"),
        )


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
