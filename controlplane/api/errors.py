"""How is a failure told? Always as OpenAI's error object; one table from exception to status and code.

What a backend said of itself goes to the log; the caller reads our own words.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from http import HTTPStatus
from math import ceil
from typing import Any, get_args

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response

from controlplane.api.protocol.requests import (
    HEADER_DECISION,
    HEADER_RETRY_AFTER_MS,
    HEADER_SHOULD_RETRY,
    UNSERVED,
)
from controlplane.core.clock import to_milliseconds
from controlplane.core.decision import Reason
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory, Refused
from controlplane.service.ticket import DecisionFailed, Rejected

_SECONDS = 10.0
_MOST_LINES = 100


class LogRateLimiter(logging.Filter):
    """A line that was told less than ten seconds ago is counted, and told with the next like it."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if record.exc_info is not None:
            return True
        told_at = self._told.get(line)
        if told_at is not None and record.created - told_at < _SECONDS:
            self._kept_back[line] = self._kept_back.get(line, 0) + 1
            return False
        if count := self._kept_back.pop(line, 0):
            record.msg, record.args = f"{line} (and {count} times more in between)", ()
        if len(self._told) >= _MOST_LINES:
            self._told.clear()
            self._kept_back.clear()
        self._told[line] = record.created
        return True


log = logging.getLogger(__name__)
log.addFilter(LogRateLimiter())

HEADER_DROPPED = "x-llm-d-request-dropped-reason"

_DROPPED = {
    Reason.NO_MEMORY: "rejected-saturated",
    Reason.NO_SLOT: "rejected-saturated",
    Reason.NO_PACE: "rejected-saturated",
    Reason.BEHIND_OTHERS: "rejected-saturated",
    Reason.SLO_UNATTAINABLE: "rejected-saturated",
    Reason.QUEUE_FULL: "rejected-saturated",
    Reason.RATE_LIMITED: "rejected-saturated",
    Reason.QUEUE_TIMEOUT: "rejected-ttl-expired",
    Reason.SHUTTING_DOWN: "rejected-shutting-down",
}
_EVICTED = {
    Reason.SLO_UNATTAINABLE: "evicted-queue-pressure",
    Reason.SHUTTING_DOWN: "evicted",
}
_REJECT_CODES = {
    Reason.NEVER_FITS: "context_length_exceeded",
    Reason.SLO_UNATTAINABLE: "slo_unattainable",
    Reason.QUEUE_TIMEOUT: "queue_timeout",
    Reason.RATE_LIMITED: "rate_limit_exceeded",
    Reason.SHUTTING_DOWN: "shutting_down",
}
_REJECT_STATUS = {
    Reason.NEVER_FITS: 400,
    Reason.RATE_LIMITED: 429,
    Reason.SHUTTING_DOWN: 503,
}
_REJECT_WORDS = {
    Reason.NO_MEMORY: "the pool's memory is taken",
    Reason.NO_SLOT: "as many requests run as may run",
    Reason.NO_PACE: "one more would slow the answers under way below their promise",
    Reason.BEHIND_OTHERS: "others are served first",
    Reason.NEVER_FITS: "this request could never fit the pool; shorten the prompt or lower max_tokens",
    Reason.SLO_UNATTAINABLE: "the objective cannot be met now; relax it, choose another class or try later",
    Reason.QUEUE_FULL: "the queue is full",
    Reason.QUEUE_TIMEOUT: "the request waited as long as it may",
    Reason.RATE_LIMITED: "this key asks for more than its tenant may in a minute",
    Reason.SHUTTING_DOWN: "the server is shutting down",
}
_REFUSED_STATUS = {"model_not_found": 404, "service_class_not_allowed": 403}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Failure:
    """What the caller is told."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


_OURS = Failure(500, "an unexpected error happened here; it was logged", code="internal_error")


def error_response(failure: Failure) -> Response:
    return Response(
        failure.body, status_code=failure.status, headers=failure.headers, media_type="application/json"
    )


class Problem(Exception):
    """A failure that the door itself found."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(status, message, param, code, headers or {})


def failure_of(error: BaseException, *, overload_status: int) -> Failure:
    """Logs what the caller is not told."""
    match error:
        case Problem():
            return error.failure
        case Rejected():
            return _rejected(error, overload_status)
        case Refused():
            status = _REFUSED_STATUS.get(error.code or "", 400)
            return Failure(status, str(error), error.param, error.code or "invalid_value")
        case BackendDown():
            log.warning("backend down: %s", error)
            told = "the model's engine is not running now; try again later"
            headers = {} if error.retry_after is None else _come_back(error.retry_after * 1_000)
            return Failure(503, told, code="backend_down", headers=headers)
        case NoMemory():
            log.error("no memory: %s", error)
            told = (
                f"the device has no memory for input[{error.position}], even with nothing beside it; "
                "send less text in it, or try again when others hold less"
            )
            return Failure(503, told, "input", "out_of_memory")
        case BackendFailed():
            log.error("backend failed: %s", error)
            where = "" if error.position is None else f", at input[{error.position}]"
            return Failure(500, f"the model's engine failed on this request{where}", code="backend_failed")
        case DecisionFailed():
            return _OURS
        case HTTPException():
            return _http(error)
        case BaseExceptionGroup():
            return failure_of(error.exceptions[0], overload_status=overload_status)
    log.error("unexpected failure", exc_info=error)
    return _OURS


def _rejected(error: Rejected, overload_status: int) -> Failure:
    reject = error.reject
    status = _REJECT_STATUS.get(reject.reason, overload_status)
    headers = {HEADER_DECISION: "REJECT"}
    dropped = _EVICTED if error.is_evicted else _DROPPED
    if reject.reason in dropped:
        headers[HEADER_DROPPED] = dropped[reject.reason]
    if reject.retry_after is not None:
        headers |= _come_back(to_milliseconds(reject.retry_after))
    else:
        headers[HEADER_SHOULD_RETRY] = "false"
    words = _REJECT_WORDS[reject.reason]
    message = f"{words}: {reject.detail}" if reject.detail else words
    return Failure(status, message, code=_REJECT_CODES.get(reject.reason, "overloaded"), headers=headers)


def _come_back(after_ms: float) -> dict[str, str]:
    wait_ms = max(1, ceil(after_ms))
    return {HEADER_RETRY_AFTER_MS: str(wait_ms), "retry-after": str(ceil(wait_ms / 1000))}


def _http(error: HTTPException) -> Failure:
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = str(error.detail)
    if error.status_code == 404:
        message = "no such path; the API's paths begin with /v1, see /openapi.json"
    if error.status_code == 405:
        message = f"this path answers only to {(error.headers or {}).get('Allow', 'another method')}"
    code = codes.get(error.status_code, HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return Failure(error.status_code, message, code=code, headers=dict(error.headers or {}))


def invalid_body(error: ValidationError, model: type[BaseModel]) -> Problem:
    """The first fault of a body, named in the caller's words."""
    fault = error.errors(include_url=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        told = fault["ctx"]["error"]
        if "hex escape" in told:
            told += " (half of a surrogate pair is no character; replace it)"
        return Problem(400, f"the body is not valid JSON: {told}", code="invalid_json")
    if not fault["loc"] and fault["type"] != "conflict":
        return Problem(400, "the body must be one JSON object", code="invalid_json")
    if fault["type"] == "conflict":
        param = ".".join(part for part in (param, fault["ctx"]["field"]) if part)
        return Problem(400, f"{param}: {fault['ctx']['rule']}", param=param, code="invalid_value")
    if fault["type"] == "missing":
        return Problem(400, f"{param}: is required; add it", param=param, code="missing_required_parameter")
    if fault["type"] in ("extra_forbidden", "none_required"):
        return _not_taken(param, fault, model)
    is_required = param in model.model_fields and model.model_fields[param].is_required()
    remedy = "change it" if is_required else "change it or leave it out"
    return Problem(
        400, f"{param}={_shown(fault['input'])}: {_rule(fault)}; {remedy}", param=param, code="invalid_value"
    )


def _not_taken(param: str, fault: ErrorDetails, model: type[BaseModel]) -> Problem:
    if param in UNSERVED:
        return Problem(
            400, f"{param}: is not served; {UNSERVED[param]}", param=param, code="unsupported_parameter"
        )
    *parents, key = map(str, fault["loc"])
    near = get_close_matches(key, _fields_at(model, parents), n=1)
    remedy = f"did you mean {'.'.join([*parents, near[0]])}?" if near else "remove it"
    return Problem(400, f"{param}: unknown field; {remedy}", param=param, code="unknown_parameter")


def _fields_at(model: type[BaseModel], parents: Sequence[str]) -> Sequence[str]:
    """Of the object there; none where it is none of ours."""
    for name in parents:
        found = model.model_fields.get(name)
        kinds = () if found is None else (found.annotation, *get_args(found.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return ()
        model = inner[0]
    return tuple(model.model_fields)


def _rule(fault: ErrorDetails) -> str:
    text = fault["msg"].replace("Input should be", "should be", 1).replace(" after validation", "", 1)
    return text + _misfit(fault["input"]) if fault["type"] == "shape" else text


def _misfit(value: object) -> str:
    """Which item of a list is none that may be there: 2,048 are too many to look through."""
    if not isinstance(value, list) or not value:
        return ""
    if (odd := _odd_item(value, {str, int, list, dict})) is not None:
        return f"; item {odd[0]} is {_shown(odd[1])}"
    return f"; these are {len(value):,}" if not isinstance(value[0], dict) else ""


def _odd_item(items: list[Any], kinds: set[type]) -> tuple[str, object] | None:
    """Where the first is that is of no such kind, unlike the first of all, empty or below 0; and it."""
    kind = type(items[0])
    for at, item in enumerate(items):
        if kind not in kinds or type(item) is not kind or item in ("", []) or (kind is int and item < 0):
            return str(at), item
        if kind is list and (inside := _odd_item(item, {int})) is not None:
            return f"{at}[{inside[0]}]", inside[1]
    return None


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`."""
    path = ""
    for part in loc:
        if part == "[key]":
            # Pydantic's word for a name that is at fault, not its value; the name is there already.
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
