"""Startup messages as JSON: options sent to the worker, and properties of the model sent back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.pair_template import PairTemplate
from backends.embedding.time_model import PassTime
from backends.embedding.truncation import Truncation
from controlplane.core.errors import Refused
from controlplane.core.ports import TruncationSide


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Settings of a worker.

    None leaves the choice to the model (`dtype`, `normalize`, `max_input_tokens`) or to torch (`device`,
    `threads`). A worker with `idle_cpu_priority` is moved into the idle class by the server. One that
    `scores_pairs` loads a cross-encoder. `environment` is added to that of the server.
    """

    model: str
    batch_tokens: int
    device: str | None = None
    dtype: str | None = None
    normalize: bool | None = None
    max_input_tokens: int | None = None
    threads: int | None = None
    idle_cpu_priority: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False
    scores_pairs: bool = False

    def to_json(self) -> str:
        """Serializes the options for the worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EncoderOptions":
        """Parses the output of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """Properties of a loaded model.

    `tokenizer` is the serialized fast tokenizer. Token ids are below `vocabulary`. `lanes` is the number of
    passes computed concurrently. `prompts` are texts to put before an input, by name. The inputs of a
    cross-encoder are made by `pairs`; its `tokenizer` adds no special tokens, and a row is a score and its
    logit.
    """

    dimension: int
    max_input_tokens: int
    vocabulary: int
    weight_bytes: int
    device: str
    lanes: int
    idle_cpu_priority: bool
    time: PassTime
    memory: EmbeddingMemory
    tokenizer: str
    truncation: Truncation
    prompts: Mapping[str, str]
    default_prompt: str | None
    pairs: PairTemplate | None

    def workspace_bytes(self, batch_tokens: int) -> int:
        """Bytes of the largest passes on all lanes, for passes of at most `batch_tokens`."""
        tokens = self.time.full_speed_tokens(batch_tokens)
        return self.lanes * self.memory.workspace_bytes(
            budget_tokens=tokens, max_input_tokens=self.max_input_tokens
        )

    def to_json(self) -> bytes:
        """Serializes the properties as the payload of a READY frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "EncoderFacts":
        """Parses the output of `to_json`."""
        facts: dict[str, Any] = json.loads(text)
        cut, pairs = facts["truncation"], facts["pairs"]
        typed = {
            "memory": EmbeddingMemory(**facts["memory"]),
            "time": PassTime(**facts["time"]),
            "truncation": Truncation(tuple(cut["opening"]), tuple(cut["closing"]), cut["side"]),
            "pairs": None if pairs is None else PairTemplate(**pairs),
        }
        return cls(**facts | typed)


class ModelProperties:
    """The part of the `Embedder` port that the properties of the loaded model determine."""

    @property
    def facts(self) -> EncoderFacts:
        """Properties reported by the worker. Raises BackendDown before the first start."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        """Length of a full vector."""
        return self.facts.dimension

    @property
    def max_input_tokens(self) -> int:
        """Tokens of the longest input, special tokens included."""
        return self.facts.max_input_tokens

    @property
    def vocabulary(self) -> int:
        """Number of token ids; all ids are below it."""
        return self.facts.vocabulary

    @property
    def special_tokens(self) -> tuple[Sequence[int], Sequence[int]]:
        """Token ids before and after every text."""
        return self.facts.truncation.opening, self.facts.truncation.closing

    @property
    def prompts(self) -> Mapping[str, str]:
        """The model's prompts by name, to be put before a text."""
        return self.facts.prompts

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Cuts `token_ids` to `limit`, keeping the special tokens around the text."""
        return self.facts.truncation.truncate(token_ids, limit, side)

    def pair(
        self, query: Sequence[int], document: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """Joins both to one input of at most `limit` tokens. Raises Refused if it is no cross-encoder."""
        if self.facts.pairs is None:
            raise Refused("the model embeds single texts; rerank by one of models.rerankers", param="model")
        return self.facts.pairs.join(query, document, limit, side)
