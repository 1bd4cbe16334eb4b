"""What does this caller expect of its answer? From headers, from the body, or from both if they agree."""

from collections.abc import Iterable

from controlplane.api.errors import Problem
from controlplane.api.protocol.requests import HEADER_SERVICE_CLASS, MAX_OBJECTIVE_MS, Objectives
from controlplane.service.jobs import RequestHints

_PARTS = {
    b"x-slo-ttft-ms": "ttft_ms",
    b"x-llm-d-slo-ttft-ms": "ttft_ms",
    b"x-slo-tpot-ms": "tpot_ms",
    b"x-llm-d-slo-tpot-ms": "tpot_ms",
    b"x-slo-e2e-ms": "e2e_ms",
}
_CLASS = HEADER_SERVICE_CLASS.encode()
_LONGEST_NUMBER = 24
_NO_HINTS = RequestHints()


def hints_of(headers: Iterable[tuple[bytes, bytes]], body: Objectives) -> RequestHints:
    """`headers` with lower-case names. Raises Problem naming what is malformed or contradicts another."""
    stated: dict[str, tuple[str, float | str]] = {}
    if body.service_class is not None:
        stated["service_class"] = ("service_class", body.service_class)
    if body.slo is not None:
        for part, value in body.slo:
            if value is not None:
                stated[part] = (f"slo.{part}", value)
    for name, raw in headers:
        if name == _CLASS:
            _state(stated, "service_class", HEADER_SERVICE_CLASS, raw.decode("latin-1"))
        elif name in _PARTS:
            source = name.decode()
            _state(stated, _PARTS[name], source, _objective(source, raw.decode("latin-1")))
    if not stated:
        return _NO_HINTS
    return RequestHints(**{part: value for part, (_, value) in stated.items()})  # type: ignore[arg-type]


def _state(stated: dict[str, tuple[str, float | str]], part: str, source: str, value: float | str) -> None:
    first_source, first = stated.setdefault(part, (source, value))
    if first != value:
        raise Problem(
            400,
            f"{source}={value} contradicts {first_source}={first}; send one of them",
            param=first_source,
            code="invalid_value",
        )


def _objective(source: str, text: str) -> float:
    """Plain decimal notation: what `float` takes beyond it (nan, inf, 1_000) is malformed here."""
    plain = text.replace(".", "", 1)
    if plain.isascii() and plain.isdigit() and len(text) <= _LONGEST_NUMBER:
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
