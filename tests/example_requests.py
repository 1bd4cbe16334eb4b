"""Requests of which a test states only what matters to it."""

from typing import Any

from controlplane.core.clock import Instant
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo

_AT_ZERO = Instant(0)
_NO_OBJECTIVE = Slo()


def a_request(
    name: str = "r",
    prompt_tokens: int = 1,
    max_output_tokens: int = 1,
    *,
    kind: Kind = Kind.GENERATE,
    model: str = "m",
    tenant: str = "t",
    arrival: Instant = _AT_ZERO,
    slo: Slo = _NO_OBJECTIVE,
    class_name: str = "any",
    priority: int = 0,
    weight: float | None = None,
    sheddable: bool = False,
    **fields: Any,
) -> Request:
    """A request of a class of its own; `fields` are those of `Request`."""
    service_class = ServiceClass(class_name, slo, priority, sheddable, weight)
    return Request(
        name, kind, model, tenant, service_class, slo, arrival, prompt_tokens, max_output_tokens, **fields
    )
