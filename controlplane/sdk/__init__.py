"""Python client of the HTTP API: `Tandem` (blocking) and `AsyncTandem` (asyncio).

Both offer chat, stream and embed, with objectives per call, and share everything except how they wait. Of the
control plane the SDK imports only `controlplane.api.protocol.requests`.
"""

from controlplane.sdk.async_client import AsyncTandem, AsyncTextStream
from controlplane.sdk.client import Tandem, TextStream
from controlplane.sdk.errors import (
    ApiError,
    AuthenticationError,
    BadRequest,
    ConnectionLost,
    ContextLengthExceeded,
    NotFound,
    PermissionDenied,
    QueueTimeout,
    RateLimited,
    ServerError,
    ServiceUnavailable,
    SloUnattainable,
    StreamLost,
    TandemError,
)
from controlplane.sdk.protocol import ChatReply, Decision, Embeddings
from controlplane.sdk.retries import Retries

__all__ = [
    "ApiError", "AsyncTandem", "AsyncTextStream", "AuthenticationError", "BadRequest", "ChatReply",
    "ConnectionLost", "ContextLengthExceeded", "Decision", "Embeddings", "NotFound", "PermissionDenied",
    "QueueTimeout", "RateLimited", "Retries", "ServerError", "ServiceUnavailable", "SloUnattainable",
    "StreamLost", "Tandem", "TandemError", "TextStream",
]  # fmt: skip
