"""What HAProxy tells a router of a request, in one header, and what a router makes of it.

The header has the form of a query string. The body is not read: a router needs its size only, and a client
with a prompt of a megabyte would wait for two copies.
"""

from urllib.parse import parse_qs

from controlplane.api.protocol.path_kinds import KIND_OF_PATH
from controlplane.core.request import Kind
from controlplane.fleet.router import RoutedRequest

HEADER_ROUTE = "x-tandem-route"

HAPROXY_FORMAT = "&".join(
    (
        "path=%[path,url_enc]",
        "bytes=%[req.hdr(content-length)]",
        "class=%[req.hdr(x-service-class),url_enc]",
        "class=%[req.hdr(x-llm-d-inference-objective),url_enc]",
        "class=%[req.hdr(x-gateway-inference-objective),url_enc]",
        "session=%[req.hdr(x-session-id),url_enc]",
    )
)
"""The value of the header as a log format of HAProxy."""

_BYTES_PER_TOKEN = 4
_MAX_DIGITS = 12


def owner_of(query: str) -> str:
    """Which kind of work the path asks for: "llm" or "embedding"."""
    return "embedding" if KIND_OF_PATH.get(_first(parse_qs(query), "path")) is Kind.EMBED else "llm"


def routed_request(query: str, model: str) -> RoutedRequest:
    """The request as the routing library takes it.

    All boxes with models of an owner serve the same ones, and a forecast differs by owner more than by model,
    so `model`, the scarcest one of the path's owner, stands for the one that the body names.
    A token is taken for four bytes of the body.
    """
    values = parse_qs(query)
    size = _first(values, "bytes")
    return RoutedRequest(
        model=model,
        service_class=_first(values, "class"),
        prompt_tokens=int(size) // _BYTES_PER_TOKEN if size.isdecimal() and len(size) <= _MAX_DIGITS else 0,
        session=_first(values, "session") or None,
    )


def _first(values: dict[str, list[str]], name: str) -> str:
    return values.get(name, [""])[0]
