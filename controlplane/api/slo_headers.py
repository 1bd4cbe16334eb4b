"""Reads the service class and the objectives of a request from its headers and its body."""

from collections.abc import Iterable

from controlplane.api.errors import Problem
from controlplane.api.protocol.requests import HEADER_SERVICE_CLASS, MAX_OBJECTIVE_MS, Objectives
from controlplane.service.request_jobs import NO_HINTS, RequestHints

_OBJECTIVE_HEADERS = {
    b"x-slo-ttft-ms": "ttft_ms",
    b"x-llm-d-slo-ttft-ms": "ttft_ms",
    b"x-slo-tpot-ms": "tpot_ms",
    b"x-llm-d-slo-tpot-ms": "tpot_ms",
    b"x-slo-e2e-ms": "e2e_ms",
    b"x-slo-gap-ms": "gap_ms",
}
# The others are those of llm-d's router and, older, of the Gateway API inference extension.
_CLASS_HEADERS = frozenset(
    (HEADER_SERVICE_CLASS.encode(), b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
)
_MAX_DIGITS = 24


def hints_of(headers: Iterable[tuple[bytes, bytes]], body: Objectives) -> RequestHints:
    """Returns the class and objectives that a request states.

    Args:
        headers: raw headers with lower-case names.
        body: the parsed body; its values must agree with those of the headers.

    Raises Problem (400) for a malformed value or a contradiction.
    """
    stated: dict[str, tuple[str, float | str]] = {}
    if body.service_class is not None:
        stated["service_class"] = ("service_class", body.service_class)
    if body.slo is not None:
        for part, value in body.slo:
            if value is not None:
                stated[part] = (f"slo.{part}", value)
    for name, raw in headers:
        if name in _CLASS_HEADERS:
            _add(stated, "service_class", name.decode(), raw.decode("latin-1"))
        elif name in _OBJECTIVE_HEADERS:
            source = name.decode()
            _add(stated, _OBJECTIVE_HEADERS[name], source, _objective(source, raw.decode("latin-1")))
    if not stated:
        return NO_HINTS
    return RequestHints(**{part: value for part, (_, value) in stated.items()})  # type: ignore[arg-type]


def _add(stated: dict[str, tuple[str, float | str]], part: str, source: str, value: float | str) -> None:
    """Adds a value to `stated`, unless another source gave a different one."""
    first_source, first = stated.setdefault(part, (source, value))
    if first != value:
        raise Problem(
            400,
            f"{source}={value} contradicts {first_source}={first}; send one of them",
            param=first_source,
            code="invalid_value",
        )


def _objective(source: str, text: str) -> float:
    """Parses milliseconds in plain decimal notation; unlike `float`, refuses nan, inf and 1_000."""
    plain = text.replace(".", "", 1)
    if plain.isascii() and plain.isdigit() and len(text) <= _MAX_DIGITS:
        value = float(text)
        if 0 < value <= MAX_OBJECTIVE_MS:
            return value
    raise Problem(
        400,
        f"{source}={text[:40]!r}: should be milliseconds above 0 and at most {MAX_OBJECTIVE_MS:.0f}; "
        "change it or leave it out",
        param=source,
        code="invalid_value",
    )
