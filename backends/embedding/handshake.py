"""What does the server ask of a worker, and what does the worker state about its model? JSON both ways."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import PassTime
from backends.embedding.truncation import Truncation


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """`None` leaves the choice to the model (dtype, normalize, max_input_tokens) or to torch. A worker
    that `yields_cpu` computes only what no other process wants to."""

    model: str
    batch_tokens: int
    device: str | None = None
    dtype: str | None = None
    normalize: bool | None = None
    max_input_tokens: int | None = None
    threads: int | None = None
    yields_cpu: bool = False
    trust_remote_code: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EncoderOptions":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """`tokenizer` is the serialised fast tokenizer; token ids are below `vocabulary`; `lanes` is how many
    passes are computed side by side; `prompts` are texts to put before an input, by name."""

    dimension: int
    max_input_tokens: int
    vocabulary: int
    weight_bytes: int
    device: str
    lanes: int
    yields_cpu: bool
    time: PassTime
    memory: EmbeddingMemory
    tokenizer: str
    truncation: Truncation
    prompts: Mapping[str, str]
    default_prompt: str | None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "EncoderFacts":
        facts: dict[str, Any] = json.loads(text)
        cut = facts["truncation"]
        typed = {
            "memory": EmbeddingMemory(**facts["memory"]),
            "time": PassTime(**facts["time"]),
            "truncation": Truncation(tuple(cut["opening"]), tuple(cut["closing"]), cut["side"]),
        }
        return cls(**facts | typed)
