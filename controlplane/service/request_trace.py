"""The W3C trace context of one HTTP request: its caller's span, its ids, and whether its spans are kept.

https://www.w3.org/TR/trace-context/. `tracestate` is not forwarded, since nothing is called over HTTP.
"""

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass

# A later version may add fields behind the flags.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_SPAN_BITS, _TRACE_BITS = 64, 128


@dataclass(slots=True)
class RequestTrace:
    """The trace that the requests of one HTTP request belong to.

    Attributes:
        trace_id: 128 bits, the caller's or a new one.
        span_id: 64 bits, of the span of its first gate request.
        parent_id: the caller's span; None without one.
        is_sampled: whether the spans are kept in any case, as the caller wants it or by the share.
        path: path of the HTTP request.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    is_sampled: bool
    path: str
    _is_taken: bool = False

    def take_span_id(self) -> int:
        """The id of a gate request's span: `span_id` for the first, new ones for further prompts."""
        if self._is_taken:
            return new_span_id()
        self._is_taken = True
        return self.span_id

    def header(self) -> bytes:
        """`traceparent` of the response."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.is_sampled)


TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""The trace of the HTTP request that is served in this context; None: it is not traced."""


def new_span_id() -> int:
    """A random span id, not 0."""
    return random.getrandbits(_SPAN_BITS) or 1


def trace_of(traceparent: bytes | None, path: str, share: float) -> RequestTrace:
    """The trace of a request with this header; a malformed header counts as none.

    A caller that records its trace (flag `sampled`) gets the spans; of all others the `share` does.
    """
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    caller = (0, 0, 0) if match is None else (int(match[2], 16), int(match[3], 16), int(match[4], 16))
    trace_id, parent_id, flags = caller
    if (match is not None and match[1] == b"00" and match[5]) or not trace_id or not parent_id:
        trace_id, parent_id, flags = random.getrandbits(_TRACE_BITS) or 1, 0, 0
    is_sampled = bool(flags & _SAMPLED) or random.random() < share
    return RequestTrace(trace_id, new_span_id(), parent_id or None, is_sampled, path)
