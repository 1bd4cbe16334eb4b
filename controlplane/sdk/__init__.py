"""How does a Python program talk to Tandem? By `Tandem`, or in an event loop by `AsyncTandem`.

Both chat, stream and embed, take objectives with each call, and share everything but the waiting.
Imports nothing else of ours but the wire's names.
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
