"""Streamed responses as server-sent events; the stream starts with the first token.

A failure before the first token is an HTTP error. A failure after it is an error event without [DONE], so
that a client can tell a broken stream from a complete one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import orjson
from starlette.types import Send

from controlplane.api.errors import Failure, failure_of
from controlplane.api.openai.buffered import UsageCounter, opened_answers
from controlplane.api.post_endpoint import RawHeaders, ticket_headers
from controlplane.core.errors import BackendFailed
from controlplane.core.generation import Delta
from controlplane.service.gate.gate import Gate
from controlplane.service.request_jobs import GenerateJob

_FIXED: RawHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_LINE_ENDS = (("\x85", rb"\u0085"), ("\u2028", rb"\u2028"), ("\u2029", rb"\u2029"))
"""Characters that end a line for Python's `splitlines` and so for httpx's `iter_lines`, and their JSON."""


class Envelope:
    """Encodes chunks; the fields that all chunks of a stream share are encoded once."""

    def __init__(
        self, head: Mapping[str, object], *, has_usage: bool, has_running_usage: bool = False
    ) -> None:
        self.has_usage = has_usage
        self.has_running_usage = has_running_usage
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":'
        # OpenAI sends a null usage in every chunk when the last one will carry it.
        self._tail = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    def choice(self, choice: object, usage: object = None) -> bytes:
        """The event of a chunk with one choice."""
        tail = self._tail if usage is None else _usage(usage)
        return self._head + orjson.dumps([choice]) + tail

    def usage(self, usage: object) -> bytes:
        """The event of the last chunk, which has the usage and no choice."""
        return self._head + b"[]" + _usage(usage)


def _usage(usage: object) -> bytes:
    return b',"usage":' + orjson.dumps(usage) + b"}\n\n"


class EventEncoder(Protocol):
    """Encodes the output of a request as server-sent events; an empty part is not sent.

    `counter` counts the deltas, each before it is encoded.
    """

    counter: UsageCounter

    def begin(self) -> bytes:
        """The events before the first delta; asked for again if there is nothing to send yet."""
        ...

    def encode(self, delta: Delta) -> bytes:
        """The events of `delta`."""
        ...

    def end(self) -> bytes:
        """The events after the last delta."""
        ...

    def fail(self, failure: Failure) -> bytes:
        """The last event of a stream that failed after it began."""
        ...


class ChunkEncoder:
    """The chunks of chat and text completions, which end with [DONE]."""

    def __init__(self, envelope: Envelope, choice: Callable[[Delta], object], counter: UsageCounter) -> None:
        self._envelope = envelope
        self._choice = choice
        self.counter = counter

    def begin(self) -> bytes:
        """Nothing: the first chunk has the first token."""
        return b""

    def encode(self, delta: Delta) -> bytes:
        """The chunk of `delta`."""
        usage = self.counter.usage() if self._envelope.has_running_usage else None
        return self._envelope.choice(self._choice(delta), usage)

    def end(self) -> bytes:
        """The usage, if it is asked for, and [DONE]."""
        return self._envelope.usage(self.counter.usage()) + _DONE if self._envelope.has_usage else _DONE

    def fail(self, failure: Failure) -> bytes:
        """An error event."""
        return b"event: error\ndata: " + failure.body + b"\n\n"


def escape_line_ends(event: bytes) -> bytes:
    """The event without characters inside its JSON at which some clients end a line and lose the rest.

    In server-sent events only CR and LF end one. In JSON these characters are in strings only.
    """
    if not event.isascii():
        for character, escape in _LINE_ENDS:
            event = event.replace(character.encode(), escape)
    return event


def ending(delta: Delta) -> dict[str, object]:
    """The finish reason of a chunk, and the stop reason if the choice ends."""
    reason = delta.finish_reason
    fields: dict[str, object] = {"finish_reason": reason}
    return fields if reason is None else fields | {"stop_reason": delta.stop_reason}


async def send_stream(
    send: Send,
    gate: Gate,
    jobs: Sequence[GenerateJob],
    *,
    encoder: EventEncoder,
    overload_status: int,
) -> None:
    """Runs the jobs and sends their deltas as events.

    Args:
        send: ASGI send.
        gate: runs the jobs.
        jobs: one per prompt.
        encoder: counts the usage and encodes the events.
        overload_status: status of a rejection because of load.

    Raises whatever fails before the first event; later failures become an error event.
    """
    has_begun = False
    try:
        async with opened_answers(gate, jobs) as (tickets, deltas):
            async for delta in deltas:
                encoder.counter.count(delta)
                event = encoder.encode(delta) if has_begun else encoder.begin() + encoder.encode(delta)
                if not event:
                    continue
                if not has_begun:
                    headers = _FIXED + ticket_headers(tickets)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    has_begun = True
                body = escape_line_ends(event)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if not has_begun:
            raise BackendFailed(f"{jobs[0].request.id}: the engine finished without any output")
        last = encoder.end()
    except Exception as error:
        if not has_begun:
            raise
        last = encoder.fail(failure_of(error, overload_status=overload_status))
        # Tickets are remembered with their error, and its traceback would keep the request. Starlette removes
        # those of other errors.
        error.__traceback__ = None
    await send({"type": "http.response.body", "body": escape_line_ends(last)})
