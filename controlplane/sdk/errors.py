"""Exceptions of the SDK; the subclass of ApiError follows from the error's code, then from the status."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson
from pydantic import ValidationError

from controlplane.api.protocol.requests import (
    HEADER_REQUEST_ID,
    HEADER_RETRY_AFTER_MS,
    HEADER_SHOULD_RETRY,
    ErrorObject,
)


class TandemError(Exception):
    """Base class of all exceptions of the SDK."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default the class is called with `args`, which are not the arguments of every subclass. A pool of
        # processes then waits for ever instead of raising the exception.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[TandemError], args: tuple[Any, ...]) -> TandemError:
    """The exception of a pickle, whose attributes are set afterwards."""
    return kind.__new__(kind, *args)


class ConnectionLost(TandemError):
    """The server could not be reached, or closed the connection without a response."""


class StreamLost(TandemError):
    """The stream broke before the response was complete; `text` is what was received."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class DeadlineExceeded(TandemError):
    """The deadline of `deadline(ms=...)` has passed; `text` is what a stream had received."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class InvalidOutput(TandemError):
    """The output does not have the schema that was asked for; `text` is the output."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class InvalidResponse(TandemError):
    """The server returned a success that is no response of this API; `base_url` may name another service."""


class TooManyTurns(TandemError):
    """The model called functions in each turn; `messages` is the conversation so far."""

    def __init__(self, message: str, messages: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.messages = messages


class ApiError(TandemError):
    """The server returned an error.

    `retry_after` is in seconds; None if the server stated no time. `is_retryable` is whether a later attempt
    may succeed.
    """

    def __init__(self, status: int, error: ErrorObject, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {error.code}: {error.message}")
        self.status = status
        self.message = error.message
        self.type = error.type
        self.param = error.param
        self.code = error.code
        self.request_id = headers.get(HEADER_REQUEST_ID)
        self.retry_after = retry_after_of(headers)
        stated = headers.get(HEADER_SHOULD_RETRY)
        self.is_retryable = (
            stated == "true" if stated in ("true", "false") else status in (408, 409, 429) or status >= 500
        )


class BadRequest(ApiError):
    """The request is invalid (status 4xx)."""


class ContextLengthExceeded(BadRequest):
    """Prompt and max_tokens exceed the context length or the memory pool."""


class NotFound(BadRequest):
    """The model or the path does not exist (404)."""


class AuthenticationError(ApiError):
    """The API key is missing or unknown (401)."""


class PermissionDenied(ApiError):
    """The key is not allowed to do this (403)."""


class ServerError(ApiError):
    """The server failed (status 5xx)."""


class ServiceUnavailable(ServerError):
    """The model's engine is down, or the server is shutting down (503)."""


class RateLimited(ApiError):
    """The server is overloaded or a rate limit is exceeded (429); retry after `retry_after`."""


class SloUnattainable(RateLimited):
    """The request was rejected because it is predicted to miss its objective."""


class QueueTimeout(RateLimited):
    """The request was rejected after the longest waiting time."""


NOT_READY = (ServerError, NotFound, ConnectionLost, InvalidResponse)
"""Errors of a server that is starting, failing or not there; an ingress without a backend may answer 404."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
"""What the parser of a response raises if the content is no JSON, or JSON of another format."""

_BY_CODE = {
    "context_length_exceeded": ContextLengthExceeded,
    "overloaded": RateLimited,
    "queue_timeout": QueueTimeout,
    "rate_limit_exceeded": RateLimited,
    "slo_unattainable": SloUnattainable,
}
_BY_STATUS = {
    401: AuthenticationError,
    403: PermissionDenied,
    404: NotFound,
    429: RateLimited,
    503: ServiceUnavailable,
}


def api_error(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Builds the exception of an error response."""
    try:
        error = ErrorObject.model_validate(orjson.loads(content)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError):
        # A proxy may return an error in a format of its own.
        error = ErrorObject(message=content[:500].decode(errors="replace"), type="unknown")
    general = ServerError if status >= 500 else BadRequest
    return _BY_CODE.get(error.code or "", _BY_STATUS.get(status, general))(status, error, headers)


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Delay before a retry, in seconds, as the server or a proxy states it; None if neither does."""
    for name, per_second in ((HEADER_RETRY_AFTER_MS, 1000), ("retry-after", 1)):
        text = headers.get(name, "")
        if text.replace(".", "", 1).isdecimal():
            return float(text) / per_second
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, OverflowError):
        return None
    # A date without a zone is in UTC (RFC 9110, section 5.6.7).
    aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
