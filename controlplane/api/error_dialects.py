"""Shows errors of the chat path in the words and shapes of the protocols that map onto it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from controlplane.api.errors import MAX_MESSAGE_BYTES, Failure, Problem, clipped
from controlplane.core.errors import BackendFailed, Refused

_MESSAGES_PATH = "/v1/messages"
_COHERE_PATHS = ("/v2/", "/v1/tokenize", "/v1/detokenize")
# Cohere's clients for Python and Node, by the header that their generator adds.
_COHERE_CLIENTS = ("cohere", "cohere-ai")
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


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is of Anthropic's protocol: by its path, or by its client."""
    path = scope["path"]
    has_path = path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")
    return has_path or is_anthropic(Headers(scope=scope))


def is_cohere(headers: Headers) -> bool:
    """Whether a request comes from one of Cohere's own clients."""
    return headers.get("x-fern-sdk-name") in _COHERE_CLIENTS


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
    except BackendFailed as error:
        error.field = renamed(error.field)
        raise


def anthropic_error(failure: Failure) -> bytes:
    """Anthropic's error object as JSON, with the `param` and `code` of OpenAI's."""
    error = orjson.loads(failure.body)["error"]
    other = "api_error" if failure.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(HTTPStatus(failure.status), other)
    return orjson.dumps({"type": "error", "error": error | {"type": kind}})


def cohere_error(failure: Failure) -> bytes:
    """Cohere's error, whose message is a member of its own, with OpenAI's error object as JSON."""
    error = orjson.loads(failure.body)["error"]
    # Twice the message must not make the reply longer than others.
    error["message"] = clipped(error["message"], MAX_MESSAGE_BYTES // 2)
    return orjson.dumps({"message": error["message"], "error": error})


def response_of(failure: Failure, scope: Scope) -> Response:
    """The HTTP response of a failure, in the shape that the client of the request expects."""
    if speaks_anthropic(scope):
        body = anthropic_error(failure)
    elif scope["path"].startswith(_COHERE_PATHS) or is_cohere(Headers(scope=scope)):
        body = cohere_error(failure)
    else:
        body = failure.body
    return Response(body, failure.status, failure.headers, media_type="application/json")
