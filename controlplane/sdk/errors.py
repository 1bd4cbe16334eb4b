"""What can go wrong between a program and its answer? One tree, its leaves chosen by the error's code."""

from collections.abc import Mapping

import orjson
from pydantic import ValidationError

from controlplane.api.protocol.requests import HEADER_REQUEST_ID, HEADER_RETRY_AFTER_MS, ErrorObject


class TandemError(Exception):
    """Base of all that this module raises."""


class ConnectionLost(TandemError):
    """The server could not be reached, or left before it answered."""


class StreamLost(TandemError):
    """The stream ended before the answer did. `text` is what had come."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class ApiError(TandemError):
    """The server answered with an error. `retry_after` in seconds, when it named a time."""

    def __init__(self, status: int, error: ErrorObject, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {error.code}: {error.message}")
        self.status = status
        self.message = error.message
        self.type = error.type
        self.param = error.param
        self.code = error.code
        self.request_id = headers.get(HEADER_REQUEST_ID)
        self.retry_after = retry_after_of(headers)


class BadRequest(ApiError): ...


class ContextLengthExceeded(BadRequest): ...


class NotFound(BadRequest): ...


class AuthenticationError(ApiError): ...


class PermissionDenied(ApiError): ...


class ServerError(ApiError): ...


class ServiceUnavailable(ServerError):
    """The model's engine is down, or the server is shutting down."""


class RateLimited(ApiError):
    """There is more to do than can be done now; come back after `retry_after`."""


class SloUnattainable(RateLimited):
    """The objective could not be met, so nothing was begun."""


class QueueTimeout(RateLimited):
    """The request waited as long as it may, so nothing was begun."""


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
    try:
        error = ErrorObject.model_validate(orjson.loads(content)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError):
        # A proxy between may answer in its own shape.
        error = ErrorObject(message=content[:500].decode(errors="replace"), type="unknown")
    general = ServerError if status >= 500 else BadRequest
    return _BY_CODE.get(error.code or "", _BY_STATUS.get(status, general))(status, error, headers)


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds."""
    for name, per_second in ((HEADER_RETRY_AFTER_MS, 1000), ("retry-after", 1)):
        text = headers.get(name, "")
        if text.replace(".", "", 1).isdecimal():
            return float(text) / per_second
    return None
