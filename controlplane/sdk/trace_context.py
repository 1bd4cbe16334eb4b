"""Passes the caller's trace on to the server, in the headers of W3C Trace Context."""

import re
from collections.abc import Callable
from functools import cache

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_headers(traceparent: str | None) -> dict[str, str]:
    """Headers that continue a trace.

    Args:
        traceparent: the header's value. Without it OpenTelemetry's current span is passed on, where
            OpenTelemetry is installed.

    Raises ValueError for a malformed value.
    """
    if traceparent is not None:
        if not _TRACEPARENT.fullmatch(traceparent):
            raise ValueError(
                f"traceparent={traceparent[:80]!r}: should be VERSION-TRACE-PARENT-FLAGS in lower-case "
                "hexadecimal (W3C Trace Context); change it or leave it out"
            )
        return {"traceparent": traceparent}
    headers: dict[str, str] = {}
    if (inject := _injector()) is not None:
        inject(headers)
    return headers


@cache
def _injector() -> Callable[[dict[str, str]], None] | None:
    try:
        from opentelemetry.propagate import inject
    except ImportError:
        return None
    return inject
