"""Which models are served, and by which engines?"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Name, Positive, StallMilliseconds

# Read here too, to say what fits.
_COUNTS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size")


def _spelt(value: object) -> object:
    """YAML reads a plain `off` as false and `on` as true."""
    return ("off", "on")[value] if isinstance(value, bool) else value


@section(frozen=True, config=STRICT)
class ChatModel:
    """`engine` is passed to vLLM as it stands (vLLM's own argument names). `tool_parser` and
    `reasoning_parser` name vLLM's own, which tell calls of functions, and thoughts, from the answer.
    `hybrid_cache` lets requests keep hidden states instead of keys and values: `auto` where the model can and
    memory is short, `on` always. `stall_ms`: an engine that has requests but takes no step for so long, and
    for ten times what its longest should take, is killed."""

    model: Name
    name: Name | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    hybrid_cache: Annotated[Literal["off", "auto", "on"], BeforeValidator(_spelt)] = "off"
    # As long as vLLM gives the processes of one engine to answer each other.
    stall_ms: StallMilliseconds = 300_000

    def __post_init__(self) -> None:
        if "gpu_memory_utilization" in self.engine:
            raise ValueError(
                "engine.gpu_memory_utilization: the KV cache is sized by `pool` and `quota.llm`; remove it"
            )
        for name in _COUNTS:
            count = self.engine.get(name)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ValueError(
                    f"engine.{name}={count!r}: a whole number of 1 or more is needed, or nothing"
                )

    @property
    def served_name(self) -> str:
        return self.name or self.model


@section(frozen=True, config=STRICT)
class EmbeddingModel:
    """`idle_cpu_priority` (for models on a CPU): compute only what no other process wants; by default so
    where a chat model is served too. `stall_ms`: a worker that owes an answer for so long, and for ten times what its
    work should take, is replaced; loading the first time may take longer. `normalize`: vectors of unit
    length or as the layers give them, whatever the model itself says."""

    model: Name
    name: Name | None = None
    batch_tokens: Positive = 16_384
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    max_running: Positive = 256
    threads: Positive | None = None
    idle_cpu_priority: bool | None = None
    stall_ms: StallMilliseconds = 60_000
    max_input_tokens: Positive | None = None
    normalize: bool | None = None
    dimensions: tuple[Positive, ...] = ()
    trust_remote_code: bool = False

    @property
    def served_name(self) -> str:
        return self.name or self.model


@section(frozen=True, config=STRICT)
class ModelsSection:
    chat: ChatModel | None = None
    embeddings: tuple[EmbeddingModel, ...] = ()

    def __post_init__(self) -> None:
        names = [model.served_name for model in self.all()]
        if not names:
            raise ValueError("no model is configured; add chat, embeddings or both")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]!r} names two models; give one of them another `name`")

    def all(self) -> list[ChatModel | EmbeddingModel]:
        return [model for model in (self.chat, *self.embeddings) if model is not None]
