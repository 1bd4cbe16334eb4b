"""Python client of the HTTP API: `Tandem` (blocking) and `AsyncTandem` (asyncio).

Both have the same methods and share everything except how they wait. `deadline(ms=...)` bounds all calls of a
block. Of the control plane the SDK imports only `controlplane.api.protocol.requests`.
"""

from controlplane.sdk.async_client import AsyncTandem, AsyncTextStream
from controlplane.sdk.bulk_embedding import EmbeddedBatch
from controlplane.sdk.client import Tandem, TextStream
from controlplane.sdk.deadline import CallDeadline, deadline
from controlplane.sdk.errors import (
    ApiError,
    AuthenticationError,
    BadRequest,
    ConnectionLost,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidOutput,
    InvalidResponse,
    NotFound,
    PermissionDenied,
    QueueTimeout,
    RateLimited,
    ServerError,
    ServiceUnavailable,
    SloUnattainable,
    StreamLost,
    TandemError,
    TooManyTurns,
)
from controlplane.sdk.replies import (
    ChatReply,
    Completion,
    Decision,
    Embeddings,
    Readiness,
    RerankedDocuments,
    ScoredDocument,
    ServedModel,
    TokenizedText,
)
from controlplane.sdk.retries import Retries
from controlplane.sdk.workflows import Answer, ToolRun

__all__ = [
    "Answer", "ApiError", "AsyncTandem", "AsyncTextStream", "AuthenticationError", "BadRequest",
    "CallDeadline", "ChatReply", "Completion", "ConnectionLost", "ContextLengthExceeded",
    "DeadlineExceeded", "Decision", "EmbeddedBatch", "Embeddings", "InvalidOutput", "InvalidResponse",
    "NotFound", "PermissionDenied", "QueueTimeout", "RateLimited", "Readiness", "RerankedDocuments",
    "Retries", "ScoredDocument", "ServedModel", "ServerError", "ServiceUnavailable", "SloUnattainable",
    "StreamLost", "Tandem", "TandemError", "TextStream", "TokenizedText", "TooManyTurns", "ToolRun",
    "deadline",
]  # fmt: skip
