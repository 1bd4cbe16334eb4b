"""New."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.core.ports import TruncationSide
from controlplane.core.request import Request


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `allowed_classes` is None where every class may be named."""

    tenant: str
    allowed_classes: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What the caller says of its objective, range-checked at the edge."""

    service_class: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    request: Request
    prompt: Sequence[int]
    sampling: Sampling
    chat: ChatPrompt | None = None


@dataclass(frozen=True, slots=True)
class TruncationRequest:
    """What has more than `tokens` (None: than the model takes) loses the rest at that `side` (None: where
    the model's tokenizer cuts)."""

    tokens: int | None = None
    side: TruncationSide | None = None


MODEL_LIMIT = TruncationRequest()


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """`texts` are the inputs as they came, empty unless their vectors are those of the plain texts."""

    request: Request
    inputs: Sequence[Sequence[int]]
    texts: Sequence[str] = ()
