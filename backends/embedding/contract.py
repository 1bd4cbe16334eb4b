"""What does the server ask of a worker, and what does the worker state about its model? JSON both ways."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from backends.embedding.memory_model import EmbeddingMemory


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """`None` leaves the choice to the model (dtype, normalize, max_input_tokens) or to torch."""

    model: str
    batch_tokens: int
    device: str | None = None
    dtype: str | None = None
    normalize: bool | None = None
    max_input_tokens: int | None = None
    threads: int | None = None
    trust_remote_code: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EncoderOptions":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """`tokenizer` is the serialised fast tokenizer; token ids are below `vocabulary`; `pass_tokens` is
    what starting a forward pass costs, in tokens computed in the same time."""

    dimension: int
    max_input_tokens: int
    vocabulary: int
    weight_bytes: int
    device: str
    pass_tokens: int
    memory: EmbeddingMemory
    tokenizer: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "EncoderFacts":
        facts: dict[str, Any] = json.loads(text)
        return cls(**facts | {"memory": EmbeddingMemory(**facts["memory"])})
