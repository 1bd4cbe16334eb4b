"""Shows errors of the chat path in the words and shapes of the protocols that map onto it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from controlplane.api.errors import Failure, Problem, error_response
from controlplane.core.errors import Refused

_MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def is_anthropic(headers: Headers) -> bool:
    """Whether a request comes from a client of Anthropic's, which all state a version."""
    return "anthropic-version" in headers


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces chat's names of fields in errors: each key of `names` becomes its value."""
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)")

    def renamed(text: str) -> str:
        return pattern.sub(lambda found: names[found[0]], text)

    try:
        yield
    except Problem as error:
        failure = error.failure
        param = None if failure.param is None else renamed(failure.param)
        raise Problem(
            failure.status, renamed(failure.message), param=param, code=failure.code, headers=failure.headers
        ) from error
    except Refused as error:
        param = None if error.param is None else renamed(error.param)
        raise Refused(renamed(str(error)), param=param, code=error.code) from error


def anthropic_error(failure: Failure) -> bytes:
    """Anthropic's error object as JSON, with the `param` and `code` of OpenAI's."""
    error = orjson.loads(failure.body)["error"]
    other = "api_error" if failure.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(HTTPStatus(failure.status), other)
    return orjson.dumps({"type": "error", "error": error | {"type": kind}})


def response_of(failure: Failure, scope: Scope) -> Response:
    """The HTTP response of a failure, in the shape that the client of the request expects."""
    path = scope["path"]
    if path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/") or is_anthropic(Headers(scope=scope)):
        return Response(
            anthropic_error(failure), failure.status, failure.headers, media_type="application/json"
        )
    return error_response(failure)
