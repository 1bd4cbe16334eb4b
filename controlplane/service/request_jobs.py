"""Input of the gate from the API: caller, hints, and jobs with their inputs as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.core.clock import Instant
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.core.ports import Embedder, TruncationSide
from controlplane.core.request import Request
from controlplane.core.slo import ServiceClass


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What one version of the configuration states for the requests that arrive under it."""

    classes: Mapping[str, ServiceClass]
    default_class: str
    max_answer_values: int
    max_pair_tokens: int


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a request and the service classes that it may use; `allowed_classes` None allows all.

    `terms` are those of the version that recognized the caller's key, so that one request never meets two
    versions; None: those in force when the request is built.
    """

    tenant: str
    allowed_classes: frozenset[str] | None = None
    terms: RequestTerms | None = None


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The service class and objectives that a request states, range-checked by the API."""

    service_class: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    gap_ms: float | None = None


NO_HINTS = RequestHints()


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Where a request comes from: the client's id of it, its caller, and the class and objectives it states.

    `arrival` is when it arrived; None: now.
    """

    request_id: str
    caller: Caller
    hints: RequestHints = NO_HINTS
    arrival: Instant | None = None


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A generation request with its prompt as token ids and its sampling parameters.

    A `prompt` that the server tokenized is an array of 4 bytes per token: many requests may wait, and a list
    takes nine times as much. `charged_tokens` were charged to its tenant's rate limits before it was
    tokenized; None if nothing was.
    """

    request: Request
    prompt: Sequence[int]
    sampling: Sampling
    chat: ChatPrompt | None = None
    charged_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TruncationRequest:
    """Truncates inputs to `tokens` at `side`.

    None for `tokens` means the model's limit; None for `side` means the default of the model's tokenizer.
    """

    tokens: int | None = None
    side: TruncationSide | None = None


MODEL_LIMIT = TruncationRequest()


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts to score in pairs: one query for all documents, or one for each.

    The fields name their members in the request body. Each query is cut to its first `query_tokens` before it
    is joined with a document, and each document to `document_tokens`; None leaves them whole.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    query_field: str = "query"
    document_field: str = "documents"
    query_tokens: int | None = None
    document_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """An embedding or reranking request with its inputs as token ids, and the worker that computes it.

    `texts` are the inputs as sent, and empty if a prompt name or a truncation changes their vectors.
    `charged_tokens` is that of `GenerateJob`.
    """

    request: Request
    embedder: Embedder
    inputs: Sequence[Sequence[int]]
    texts: Sequence[str] = ()
    charged_tokens: int | None = None
