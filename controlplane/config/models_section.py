"""Section `models`: the chat model, embedding models and rerankers, each with its engine's settings."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds, Name, Positive, StallMilliseconds

# The memory plan reads these engine arguments.
_COUNTS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size",
    "pipeline_parallel_size",
)  # fmt: skip


def _spelt(value: object) -> object:
    """Maps the booleans that YAML reads from `off` and `on` back to these words."""
    return ("off", "on")[value] if isinstance(value, bool) else value


def _restart(value: object) -> object:
    """Maps `never` to None, and a key without a value to the defaults."""
    if value == "never":
        return None
    return {} if value is None else value


@section(frozen=True, config=STRICT)
class RestartSection:
    """Restarts of an LLM engine that died or was killed because it hung."""

    attempts: Positive = 5
    """Restarts within `window_ms` at most. If that many do not suffice, the server drains and exits with
    status 1."""
    window_ms: Milliseconds = 600_000
    """The time over which `attempts` counts."""
    backoff_ms: Milliseconds = 1_000
    """The first restart in the window is immediate, the second waits this long, and each further one twice
    as long as the one before, up to a minute."""


@section(frozen=True, config=STRICT)
class NamedModel:
    """Keys of every model."""

    model: Name
    """Folder or Hugging Face name."""
    name: Name | None = None
    """Name that clients send as `model`; the value of `model` by default."""

    @property
    def served_name(self) -> str:
        """The name that clients send."""
        return self.name or self.model


@section(frozen=True, config=STRICT)
class ChatModel(NamedModel):
    """The model for chat and text completions."""

    backend: Name = "vllm"
    """LLM backend: `vllm`, or the name of a plug-in of the slot `generator`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments under vLLM's own names; gpu_memory_utilization is refused. A plug-in backend gets them
    as they are."""
    lora_modules: Mapping[Name, Name] = field(default_factory=dict)
    """LoRA adapters: the name that clients send as `model`, and the folder of the adapter in PEFT's format.
    Needs `engine.enable_lora: true`, and `engine.max_lora_rank` for ranks above 16. The memory plan does not
    know the size of the adapters; add it to `pool.reserve`."""
    tool_parser: str | None = None
    """Tool-call parser of vLLM for the model family; without it requests with `tools` are rejected."""
    tool_strictness: Literal["auto", "function", "parameter"] = "auto"
    """What a grammar enforces in tool calls that the model chooses: `auto`, the schemas of tools with
    `strict: true`; `function`, the form of every call, too; `parameter`, the schemas of all tools. A call
    that the request requires always follows the schema of its tool."""
    reasoning_parser: str | None = None
    """Reasoning parser of vLLM for the model family; it separates `reasoning` from `content`."""
    hybrid_cache: Annotated[Literal["off", "auto", "on"], BeforeValidator(_spelt)] = "off"
    """Let requests cache hidden states instead of keys and values: `auto` if the model supports it and
    memory is short, `on` always."""
    # vLLM gives the processes of one engine the same time to reply to each other.
    stall_ms: StallMilliseconds = 300_000
    """An engine with requests that finishes no step for this long, and for ten times the expected step
    time, is killed."""
    restart: Annotated[RestartSection | None, BeforeValidator(_restart)] = field(
        default_factory=RestartSection
    )
    """How a dead engine is restarted, while embeddings go on; {} for the defaults. `never`: the server
    drains and exits with status 1, so that what supervises it can act."""

    def __post_init__(self) -> None:
        if "gpu_memory_utilization" in self.engine:
            raise ValueError(
                "engine.gpu_memory_utilization: the KV cache is sized by `pool` and `quota.llm`; remove it"
            )
        if self.lora_modules and self.engine.get("enable_lora") is not True:
            raise ValueError(
                f"lora_modules names {', '.join(self.lora_modules)}, and engine.enable_lora is not true; "
                "set it"
            )
        for name in _COUNTS:
            count = self.engine.get(name)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ValueError(
                    f"engine.{name}={count!r}: should be a whole number of at least 1; change it or remove it"
                )


@section(frozen=True, config=STRICT)
class WorkerModel(NamedModel):
    """Keys of every model that is served in a worker process of its own."""

    batch_tokens: Positive = 16_384
    """Padded tokens of one forward pass at most; they bound its memory and its time."""
    device: str | None = None
    """Device in torch's notation, for example cuda; torch's choice by default."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Weight type; the model's own by default."""
    max_running: Positive = 256
    """Requests that run at the same time at most."""
    threads: Positive | None = None
    """CPU threads of the worker; torch's choice by default."""
    idle_cpu_priority: bool | None = None
    """On a CPU, keep the worker in Linux's SCHED_IDLE class while a generation runs and every embedding can
    wait: it then computes only on cores that no other process wants. Without the permission to leave that
    class (CAP_SYS_NICE or RLIMIT_NICE 20) it is not used. Default: true if a chat model is served too."""
    mps_below_normal: bool | None = None
    """On CUDA under MPS, start the worker with CUDA_MPS_CLIENT_PRIORITY below normal. Default: true if a chat
    model is served too."""
    mps_thread_percentage: Annotated[int, Field(ge=1, le=100)] | None = None
    """On CUDA under MPS, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of the worker; all of the device by default."""
    stall_ms: StallMilliseconds = 60_000
    """A worker with unfinished work and no reply for this long, and for ten times the expected time, is
    killed and replaced; the first load of the model may take longer."""
    max_input_tokens: Positive | None = None
    """Longest input in tokens, of a reranker the longest pair; the model's own limit by default."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository contains."""

    def mps_environment(self, *, has_chat: bool) -> dict[str, str]:
        """Environment that CUDA reads when it is initialized, and ignores without an MPS server."""
        found = {}
        if has_chat if self.mps_below_normal is None else self.mps_below_normal:
            found["CUDA_MPS_CLIENT_PRIORITY"] = "1"
        if self.mps_thread_percentage is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.mps_thread_percentage)
        return found


@section(frozen=True, config=STRICT)
class EmbeddingModel(WorkerModel):
    """An embedding model, served in a worker process of its own."""

    backend: Name = "sentence-transformers"
    """Embedding backend: `sentence-transformers`, or the name of a plug-in of the slot `embedder`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a plug-in backend, passed to it as they are; sentence-transformers takes none."""
    normalize: bool | None = None
    """Scale vectors to unit length (true) or return them as computed (false); the model's rule by default."""
    dimensions: tuple[Positive, ...] = ()
    """Shorter vector lengths that clients may request; only for Matryoshka models."""


@section(frozen=True, config=STRICT)
class RerankerModel(WorkerModel):
    """A cross-encoder with one label, served in a worker process of its own by sentence-transformers.

    It shares `quota.embedding` and the waiting queue of embeddings.
    """


@section(frozen=True, config=STRICT)
class ModelsSection:
    """The models to serve: at least one."""

    chat: ChatModel | None = None
    """The chat model; none by default."""
    embeddings: tuple[EmbeddingModel, ...] = ()
    """The embedding models; none by default."""
    rerankers: tuple[RerankerModel, ...] = ()
    """The rerankers; none by default."""

    def __post_init__(self) -> None:
        names = [model.served_name for model in self.all()]
        names += [] if self.chat is None else self.chat.lora_modules
        if not names:
            raise ValueError("no model is configured; add chat, embeddings or rerankers")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} names two models; give one of them another `name`")

    @property
    def encoders(self) -> tuple[EmbeddingModel | RerankerModel, ...]:
        """The models of worker processes, which share the embedding quota."""
        return (*self.embeddings, *self.rerankers)

    def all(self) -> list[ChatModel | EmbeddingModel | RerankerModel]:
        """The chat model first, if there is one."""
        return [model for model in (self.chat, *self.encoders) if model is not None]
