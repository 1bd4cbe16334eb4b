"""Maps exceptions to HTTP status, code and OpenAI's error object.

Messages of a backend go to the log only; the client gets the texts of this module.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from http import HTTPStatus
from math import ceil
from reprlib import Repr
from types import NoneType
from typing import Any, get_args

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from controlplane.api.protocol.requests import (
    HEADER_DECISION,
    HEADER_RETRY_AFTER_MS,
    HEADER_SHOULD_RETRY,
)
from controlplane.api.protocol.unserved import UNSERVED
from controlplane.core.clock import to_milliseconds
from controlplane.core.decision import Reason
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory, Refused, WorkerDied
from controlplane.service.ticket import DecisionFailed, Rejected

MAX_MESSAGE_BYTES = 1_800
"""Longest message of an error object, which may quote the request; the whole reply stays below 4 KB."""
MAX_PARAM_BYTES = 128
MAX_VALUE_CHARACTERS = 80
# A list of texts or lists that is longer is refused for its length, and searching it takes 1 µs per item.
_MAX_SEARCHED_ITEMS = 4_096
# Token ids are searched in parts by functions of C.
_SEARCHED_AT_ONCE = 4_096
_UNKNOWN_RETRY_MS = 5_000
"""Retry-After of a 503 whose cause states no time: coming back so often costs next to nothing."""
# A suggestion for a longer name would cost more than it helps.
_MAX_SUGGESTION_CHARACTERS = 64
# JSON writes each of them in six bytes.
_CONTROL_CHARACTERS = dict.fromkeys(set(range(0x20)) - set(b"\t\n\r"), "\N{REPLACEMENT CHARACTER}")
# Its limits on containers keep a value of megabytes from being written in full.
_VALUES = Repr()
_VALUES.maxstring = MAX_VALUE_CHARACTERS

log = logging.getLogger(__name__)

HEADER_DROPPED = "x-llm-d-request-dropped-reason"
HEADER_RETRY_AFTER = "retry-after"
_ABOUT_RETRY = {HEADER_RETRY_AFTER, HEADER_SHOULD_RETRY}

_DROPPED = {
    Reason.SLO_UNATTAINABLE: "rejected-saturated",
    Reason.DEVICE_TIME: "rejected-saturated",
    Reason.QUEUE_FULL: "rejected-saturated",
    Reason.RATE_LIMITED: "rejected-saturated",
    Reason.QUEUE_TIMEOUT: "rejected-ttl-expired",
    Reason.SHUTTING_DOWN: "rejected-shutting-down",
}
_EVICTED = {
    Reason.SLO_UNATTAINABLE: "evicted-queue-pressure",
    Reason.QUEUE_TIMEOUT: "evicted-queue-pressure",
    Reason.SHUTTING_DOWN: "evicted",
}
_REJECT_CODES = {
    Reason.NEVER_FITS: "context_length_exceeded",
    Reason.SLO_UNATTAINABLE: "slo_unattainable",
    Reason.DEVICE_TIME: "device_time",
    Reason.QUEUE_TIMEOUT: "queue_timeout",
    Reason.RATE_LIMITED: "rate_limit_exceeded",
    Reason.SHUTTING_DOWN: "shutting_down",
    Reason.ENGINE_DOWN: "backend_down",
}
_REJECT_STATUS = {
    Reason.NEVER_FITS: 400,
    Reason.RATE_LIMITED: 429,
    Reason.SHUTTING_DOWN: 503,
    Reason.ENGINE_DOWN: 503,
}
_REJECT_CAUSES = {
    Reason.NEVER_FITS: "the request can never fit into the memory pool",
    Reason.SLO_UNATTAINABLE: "the request is predicted to miss its objective",
    Reason.DEVICE_TIME: "generations need the device's time more",
    Reason.QUEUE_FULL: "the waiting queue is full",
    Reason.QUEUE_TIMEOUT: "the request was not admitted within the longest waiting time",
    Reason.RATE_LIMITED: "the rate limit of the tenant is exceeded",
    Reason.SHUTTING_DOWN: "the server is shutting down",
    Reason.ENGINE_DOWN: "the model's engine is not running",
}
_REJECT_REMEDIES = {
    Reason.NEVER_FITS: "shorten the prompt or lower max_tokens",
    Reason.SLO_UNATTAINABLE: "relax the objective or use another service class",
    Reason.DEVICE_TIME: "or use a service class with a higher weight",
    Reason.SHUTTING_DOWN: "or use another server",
    Reason.ENGINE_DOWN: "or use another server",
}
_REFUSED_STATUS = {"model_not_found": 404, "service_class_not_allowed": 403}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Failure:
    """The error response for the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Adds Retry-After to a 503 that says neither when to retry nor that it is vain."""
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE and not _ABOUT_RETRY & self.headers.keys():
            object.__setattr__(self, "headers", self.headers | _retry_headers(_UNKNOWN_RETRY_MS))

    @property
    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = None if self.param is None else clipped(self.param, MAX_PARAM_BYTES)
        message = clipped(self.message, MAX_MESSAGE_BYTES)
        error = {"message": message, "type": kind, "param": param, "code": self.code}
        return orjson.dumps({"error": error})


def clipped(text: str, most_bytes: int) -> str:
    """`text` without control characters, cut to so many bytes; the reply to a hostile request stays short."""
    # No character has less than one byte.
    encoded = text[: most_bytes + 1].translate(_CONTROL_CHARACTERS).encode(errors="replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return encoded[: most_bytes - len("…".encode())].decode(errors="ignore") + "…"


_INTERNAL_ERROR = Failure(500, "internal error; the server's log has the details", code="internal_error")


class Problem(Exception):
    """A request that the API layer refuses."""

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
    """Returns the error response for an exception, and logs what the client must not see.

    `overload_status` is the status of a rejection because of load, 429 or 503.
    """
    match error:
        case Problem():
            return error.failure
        case Rejected():
            return _rejected(error, overload_status)
        case Refused():
            status = _REFUSED_STATUS.get(error.code or "", 400)
            return Failure(status, str(error), error.param, error.code or "invalid_value")
        case BackendDown():
            return _backend_down(error)
        case NoMemory():
            log.error("no memory: %s", error)
            message = (
                f"{error.field}[{error.position}] does not fit into device memory, even in a batch of its "
                "own; shorten it, or retry when the load is lower"
            )
            return Failure(503, message, error.field, "out_of_memory")
        case BackendFailed():
            log.error("backend failed: %s", error)
            where = "" if error.position is None else f" at {error.field}[{error.position}]"
            message = f"the model's engine failed on this request{where}; the server's log has the details"
            return Failure(500, message, code="backend_failed")
        case DecisionFailed():
            return _INTERNAL_ERROR
        case HTTPException():
            return _http(error)
        case ClientDisconnect():
            message = "the connection closed before the whole body arrived; send it again"
            return Failure(400, message, code="incomplete_body")
        case BaseExceptionGroup():
            return failure_of(error.exceptions[0], overload_status=overload_status)
    log.error("unexpected failure", exc_info=error)
    return _INTERNAL_ERROR


def _backend_down(error: BackendDown) -> Failure:
    log.warning("backend down: %s", error)
    if isinstance(error, WorkerDied):
        message = "two embedding workers died of this request, and others would; divide its inputs"
        return Failure(503, message, code="worker_died", headers={HEADER_SHOULD_RETRY: "false"})
    headers = down_headers(error)
    if error.is_permanent:
        remedy = "use another server"
    else:
        remedy = f"retry after {int(headers[HEADER_RETRY_AFTER_MS]) / 1_000:g} s"
    # A request has no effect but its response.
    message = f"the model's engine is not running; the request can safely be sent again: {remedy}"
    return Failure(503, message, code="backend_down", headers=headers)


def down_headers(error: BackendDown) -> dict[str, str]:
    """The headers that say when to retry after this error, or that it is vain."""
    if error.is_permanent:
        return {HEADER_SHOULD_RETRY: "false"}
    return _retry_headers(_UNKNOWN_RETRY_MS if error.retry_after is None else error.retry_after * 1_000)


def _rejected(error: Rejected, overload_status: int) -> Failure:
    reject = error.reject
    status = _REJECT_STATUS.get(reject.reason, overload_status)
    headers = {HEADER_DECISION: "EVICT" if error.is_evicted else "REJECT"}
    if reject.reason is Reason.SHUTTING_DOWN:
        # A later request on this connection would be lost when the server ends.
        headers["connection"] = "close"
    dropped = _EVICTED if error.is_evicted else _DROPPED
    if reject.reason in dropped:
        headers[HEADER_DROPPED] = dropped[reject.reason]
    if reject.retry_after is not None:
        headers |= _retry_headers(to_milliseconds(reject.retry_after))
    else:
        headers[HEADER_SHOULD_RETRY] = "false"
    code = _REJECT_CODES.get(reject.reason, "overloaded")
    return Failure(status, _reject_message(error), code=code, headers=headers)


def _reject_message(error: Rejected) -> str:
    """Cause, values and remedy of a rejection."""
    reject, slo = error.reject, error.request.slo
    # A policy of a plug-in may give any reason.
    cause = _REJECT_CAUSES.get(reject.reason, "the request cannot be served now")
    if reject.reason is Reason.NEVER_FITS and reject.detail:
        # The policy's detail names the remedy, too.
        return f"{cause}: {reject.detail}"
    if reject.detail:
        cause = f"{cause}: {reject.detail}"
    elif reject.reason is Reason.SLO_UNATTAINABLE:
        objectives = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("end to end", slo.e2e), ("gap", slo.gap))
        stated = [f"{name} {to_milliseconds(time):g} ms" for name, time in objectives if time is not None]
        cause += f" ({', '.join(stated)})" if stated else ""
    remedies = [_REJECT_REMEDIES[reject.reason]] if reject.reason in _REJECT_REMEDIES else []
    if reject.retry_after is not None:
        remedies.insert(0, f"retry after {_wait_ms(to_milliseconds(reject.retry_after)) / 1_000:g} s")
    return f"{cause}; {', '.join(remedies)}" if remedies else cause


def _wait_ms(after_ms: float) -> int:
    return max(1, ceil(after_ms))


def _retry_headers(after_ms: float) -> dict[str, str]:
    wait_ms = _wait_ms(after_ms)
    return {HEADER_RETRY_AFTER_MS: str(wait_ms), HEADER_RETRY_AFTER: str(ceil(wait_ms / 1000))}


def starting_failure(progress: str) -> Failure:
    """The error of a request that came before the service had started; `progress` names its stages."""
    message = f"the server is starting ({progress}); retry after {_UNKNOWN_RETRY_MS / 1_000:g} s"
    return Failure(503, message, code="starting")


def overload_failure(status: int) -> Failure:
    """The error of a request that was rejected before it was parsed."""
    headers = {HEADER_DECISION: "REJECT", HEADER_DROPPED: "rejected-saturated", **_retry_headers(1_000)}
    message = "the server is overloaded and did not read the request; retry after 1 s"
    return Failure(status, message, code="overloaded", headers=headers)


def _http(error: HTTPException) -> Failure:
    codes = {405: "method_not_allowed"}
    message = str(error.detail)
    if error.status_code == 405:
        message = f"method not allowed; use {(error.headers or {}).get('Allow', 'another method')}"
    code = codes.get(error.status_code, HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return Failure(error.status_code, message, code=code, headers=dict(error.headers or {}))


def invalid_body(error: ValidationError, model: type[BaseModel]) -> Problem:
    """Returns the error for the first invalid field of a body, named by its path."""
    fault = error.errors(include_url=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        cause = fault["ctx"]["error"]
        if "hex escape" in cause:
            cause += " (half of a surrogate pair is not a character; replace it)"
        return Problem(400, f"the body is not valid JSON: {cause}", code="invalid_json")
    if not fault["loc"] and fault["type"] != "conflict":
        return Problem(400, "the body should be one JSON object", code="invalid_json")
    if fault["type"] == "conflict":
        param = ".".join(part for part in (param, fault["ctx"]["field"]) if part)
        return Problem(400, f"{param}: {fault['ctx']['rule']}", param=param, code="invalid_value")
    if fault["type"] == "missing":
        return Problem(400, f"{param}: missing; add it", param=param, code="missing_required_parameter")
    if fault["type"] in ("extra_forbidden", "none_required"):
        return _unknown_field(param, fault, model)
    is_required = param in model.model_fields and model.model_fields[param].is_required()
    remedy = "change it" if is_required else "change it or leave it out"
    return Problem(
        400, f"{param}={_shown(fault['input'])}: {_rule(fault)}; {remedy}", param=param, code="invalid_value"
    )


def _unknown_field(param: str, fault: ErrorDetails, model: type[BaseModel]) -> Problem:
    if param in UNSERVED:
        return Problem(
            400, f"{param}: not supported; {UNSERVED[param]}", param=param, code="unsupported_parameter"
        )
    *parents, key = map(str, fault["loc"])
    is_short = len(key) <= _MAX_SUGGESTION_CHARACTERS
    near = get_close_matches(key, _fields_at(model, parents), n=1) if is_short else []
    remedy = f"did you mean {'.'.join([*parents, near[0]])}?" if near else "remove it"
    return Problem(400, f"{param}: unknown field; {remedy}", param=param, code="unknown_parameter")


def _fields_at(model: type[BaseModel], parents: Sequence[str]) -> Sequence[str]:
    """Names of the served fields of the nested object at `parents`; empty if it is free-form."""
    for name in parents:
        found = model.model_fields.get(name)
        kinds = () if found is None else (found.annotation, *get_args(found.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return ()
        model = inner[0]
    return [name for name, info in model.model_fields.items() if info.annotation is not NoneType]


def _rule(fault: ErrorDetails) -> str:
    text = fault["msg"].replace("Input should be", "should be", 1).replace(" after validation", "", 1)
    return text + _shape_fault(fault["input"]) if fault["type"] == "shape" else text


def _shape_fault(value: object) -> str:
    """Names the first invalid item of a list, which may have thousands of items."""
    if not isinstance(value, list) or not value:
        return ""
    is_searched = isinstance(value[0], int) or len(value) <= _MAX_SEARCHED_ITEMS
    if is_searched and (found := _invalid_item(value, {str, int, list, dict})) is not None:
        return f"; item {found[0]} is {_shown(found[1])}"
    return f"; the list has {len(value):,} items" if not isinstance(value[0], dict) else ""


def _invalid_item(items: list[Any], kinds: set[type]) -> tuple[str, object] | None:
    """Position and value of the first item that is of another type than the first, empty or negative."""
    kind = type(items[0])
    if kind is int:
        return _invalid_token(items)
    for at, item in enumerate(items):
        if kind not in kinds or type(item) is not kind or item in ("", []):
            return str(at), item
        if kind is list and (nested := _invalid_item(item, {int})) is not None:
            return f"{at}[{nested[0]}]", nested[1]
    return None


def _invalid_token(items: list[Any]) -> tuple[str, object] | None:
    """Position and value of the first item that is no token id, of up to 400,000."""
    for begin in range(0, len(items), _SEARCHED_AT_ONCE):
        part = items[begin : begin + _SEARCHED_AT_ONCE]
        if set(map(type, part)) != {int} or min(part) < 0:
            wrong = ((at, item) for at, item in enumerate(part, begin) if type(item) is not int or item < 0)
            return next((str(at), item) for at, item in wrong)
    return None


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's location as clients write it: `messages[0].content`."""
    path = ""
    for part in loc:
        if part == "[key]":
            # Pydantic marks an invalid key of a mapping so; the key itself precedes it.
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: object) -> str:
    text = _VALUES.repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."
