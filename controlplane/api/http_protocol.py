"""The HTTP/1.1 protocol of the server: uvicorn's, with limits for what a connection may take.

Bounded are the bytes and number of headers, the times to the end of headers and body, and the time in which
the client reads nothing. Errors of this layer have OpenAI's error object.
Each request is stamped with the time at which its first bytes reached the host; clients measure from there.
When the server ends, a client that uses its connection again gets a response that tells it to close it.
"""

import fcntl
import socket
import struct
import termios
import time
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from httptools import HttpParserError
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, HTTPScope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from controlplane.api.errors import Failure
from controlplane.api.load_shedding import LoadShedder
from controlplane.api.protocol.path_kinds import KIND_OF_PATH
from controlplane.api.settings import ARRIVAL, SettingsSource
from controlplane.api.unread_responses import UnreadResponses
from controlplane.core.clock import Instant, between, milliseconds
from controlplane.core.request import Kind

# struct tcp_info: eight bytes, then 32-bit numbers, of which the twelfth is the time since data was received.
_TCP_INFO_BYTES, _LAST_DATA_AT = 56, 52
# The kernel counts this time in ticks of up to 10 ms.
_TICK_MS = 10
# Chunks of a body that may be short; those beyond them have so many bytes on average. Each calls the parser
# back, and in chunks of one byte a read of 256 KB has 43,000 of them.
_SHORT_CHUNKS, _CHUNK_BYTES = 4_096, 256
# How long a refused client may go on sending, and pause meanwhile (nginx's lingering_time and
# lingering_timeout). A socket closed with unread bytes resets the connection, and the client may lose the
# response (RFC 9112, section 9.6).
_LINGER_S, _LINGER_PAUSE_S = 30.0, 5.0
# Between two reads of what nobody uses: what a refused client sends, and a body after its response. libuv
# reads up to 32 times 256 KiB of a connection in one iteration, so that ten clients with headers of 66 MiB
# made others wait for 0.2 s.
_LINGER_READ_S = 0.005
# How long a connection that is idle while the server ends stays open. Its client may be sending a request at
# that moment, which a closed connection would lose; one that uses it again gets `Connection: close`.
_LAST_REQUEST_S = 0.5
# The least rate at which a client reads the rest of a finished response. Reading little keeps the kernel from
# ending the connection, and no limit of the gate counts a request that has ended.
_LEAST_BYTES_PER_S = 16_384
# uvloop runs timers before it reads: what arrived in time is read within this.
_LATE_LOOP_S = 0.1


def raw_response(failure: Failure) -> bytes:
    """The bytes of a response that ends the connection."""
    body = failure.body
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **failure.headers,
    }
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    return b"".join([STATUS_LINE[failure.status], *lines, b"\r\n", body])


def _slow(part: str, key: str) -> bytes:
    message = (
        f"the {part} did not arrive within server.limits.{key}; send the request again, or raise the limit"
    )
    return raw_response(Failure(408, message, code="request_timeout"))


_MALFORMED = raw_response(Failure(400, "the request is not valid HTTP/1.1", code="invalid_http"))
_SHORT_CHUNKED = raw_response(
    Failure(400, "the body comes in chunks of a few bytes; send longer chunks", code="invalid_http")
)
_SLOW_HEADERS = _slow("headers", "header_timeout_ms")
_SLOW_BODY = _slow("body", "body_timeout_ms")


class _Phase(Enum):
    BETWEEN_REQUESTS = auto()
    HEADERS = auto()
    BODY = auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Requests to paths of `KIND_OF_PATH` that `shedder` rejects get `shed_answer` before their bodies are
    read; health checks, metrics and administration take little and are needed most under overload.
    Each request is bounded by the limits in force at its first byte. `unread` is shared by all connections.
    """

    def __init__(
        self,
        *arguments: Any,
        settings: SettingsSource,
        shedder: LoadShedder,
        shed_answer: ASGI3Application,
        unread: UnreadResponses,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._settings = settings
        self._limits = settings().connection
        self._shedder, self._shed_answer = shedder, shed_answer
        self._unread_responses = unread
        self._phase = _Phase.BETWEEN_REQUESTS
        self._timer: TimerHandle | None = None
        self._arrival = self._waits_since = Instant(0)
        self._read_bytes = self._unparsed_bytes = 0
        self._chunks = self._body_bytes = 0
        self._fault = _MALFORMED
        self._is_refused = False
        self._lingers_until = 0.0
        self._is_ending = False
        self._running: RequestResponseCycle | None = None
        self._unsent_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Bounds the time in which the client reads nothing, and the time to its first request."""
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        # The kernel resets the connection; uvicorn would wait for a client that reads nothing for ever.
        stalled_ms = max(1, round(1e3 * self._limits.stalled_client))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_ms)
        self._arm(self._limits.header_timeout, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timer and tells the running request that its client has left."""
        self._disarm()
        self._time_unsent(0)
        # uvicorn tells only the last request of those that were pipelined.
        self._end_running()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ends the connection after a response that says so, or once it has been idle for a moment."""
        self._is_ending, self.timeout_keep_alive = True, _LAST_REQUEST_S  # type: ignore[assignment]
        if self._is_discarding():
            self.transport.close()
        elif self.cycle is not None and not self.cycle.response_complete:
            # A response that has begun did not say that the connection ends; the next one does.
            self.cycle.keep_alive &= self.cycle.response_started
        elif self._phase is _Phase.BETWEEN_REQUESTS:
            self._unset_keepalive_if_required()
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        """Starts uvicorn's timer of an idle connection, which the next bytes end."""
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Parses the bytes, unless the request is refused before."""
        if self._is_refused:
            self._linger()
            self._read_later()
            return
        phase_before = self._phase
        if phase_before is _Phase.BETWEEN_REQUESTS:
            self._begin()
        self._read_bytes = len(data)
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._is_refused:
            return
        if self._unparsed_bytes > self._limits.max_header_bytes:
            # A header or the end of a chunk that does not end.
            self._refuse(self._too_large())
            return
        if self._phase is not phase_before or self._timer is None:
            self._time_phase()
        if self._is_discarding():
            self._read_later()

    def _begin(self) -> None:
        """Stamps a request by the time at which its first bytes reached the kernel."""
        self._phase, self._limits = _Phase.HEADERS, self._settings().connection
        self.timeout_keep_alive = self._limits.idle_timeout  # type: ignore[assignment]
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        waited_ms = struct.unpack_from("=I", info, _LAST_DATA_AT)[0]
        delay = milliseconds(waited_ms if waited_ms > _TICK_MS else 0)
        self._arrival = Instant(time.monotonic_ns() - delay)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begins the request with its arrival in the state of its scope."""
        if self._phase is _Phase.BETWEEN_REQUESTS:
            # It follows another request in the same bytes.
            self._begin()
        super().on_message_begin()
        self.scope["state"][ARRIVAL] = self._arrival

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header or a trailer."""
        if len(self.headers) >= self._limits.max_headers:
            self._stop_parsing(self._too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the request, or queues it behind the one in progress."""
        # The bytes that were read may belong to other requests and to the body.
        most = self._limits.max_header_bytes
        if max(self._read_bytes, self._unparsed_bytes) > most and self._header_bytes() > most:
            self._stop_parsing(self._too_large())
        self._phase, self._unparsed_bytes = _Phase.BODY, 0
        self._chunks = self._body_bytes = 0
        self._waits_since = self._arrival
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        """Counts a chunk of the body."""
        self._chunks += 1
        if self._chunks > _SHORT_CHUNKS + self._body_bytes // _CHUNK_BYTES:
            self._stop_parsing(_SHORT_CHUNKED)

    def on_body(self, body: bytes) -> None:
        """Passes on a part of the body."""
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the time limit of the body."""
        self._phase, self._unparsed_bytes = _Phase.BETWEEN_REQUESTS, 0
        self._disarm()
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The response came before the end of the body, which ended uvicorn's timer.
            self._close_when_idle()

    def _header_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)

    def _stop_parsing(self, fault: bytes) -> None:
        """Makes the parser fail; uvicorn then calls `send_400_response`."""
        self._fault = fault
        raise HttpParserError

    # Time limits

    def _time_phase(self) -> None:
        if self._phase is _Phase.HEADERS:
            self._arm(self._limits.header_timeout, partial(self._refuse, _SLOW_HEADERS))
        elif self._phase is _Phase.BODY:
            self._arm(self._limits.body_timeout, partial(self._refuse, _SLOW_BODY))

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._expire, act)

    def _expire(self, act: Callable[[], None]) -> None:
        """Acts unless bytes of use wait in the kernel: then the event loop is late, not the client."""
        if self._has_unread() and not self._is_discarding():
            self._arm(_LATE_LOOP_S, act)
        else:
            act()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, as `_expire` does."""
        if self._has_unread():
            self.timeout_keep_alive_task = self.loop.call_later(_LATE_LOOP_S, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def _has_unread(self) -> bool:
        if self.transport.is_closing():
            return False
        (unread,) = struct.unpack("=i", fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, bytes(4)))
        return bool(unread)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_response_complete(self) -> None:
        """Starts the next request, and bounds the time in which the client reads the rest of the response."""
        # A request that was sent ahead has waited for the one before it, not for the event loop.
        self._waits_since = Instant(time.monotonic_ns())
        super().on_response_complete()
        self._time_unsent(self.transport.get_write_buffer_size())

    def _time_unsent(self, unsent: int) -> None:
        """Looks again later, as long as something of a finished response is unsent."""
        self._unread_responses.hold(self.transport, unsent, self._settings().limits.body_memory)
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
        self._unsent_timer = (
            self.loop.call_later(self._limits.stalled_client, self._check_unsent, unsent) if unsent else None
        )

    def _check_unsent(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent > max(0, before - _LEAST_BYTES_PER_S * self._limits.stalled_client):
            self.transport.abort()
        else:
            self._time_unsent(unsent)

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """Sends the error object of malformed HTTP or of the limit that was exceeded."""
        self._refuse(self._fault)

    def _refuse(self, response: bytes) -> None:
        """Sends an error and closes the connection; an open response is aborted instead."""
        self._is_refused = True
        self._unset_keepalive_if_required()
        running = self._running
        if (
            running is not None
            and not running.response_complete
            and (running.response_started or self.pipeline)
        ):
            self.transport.abort()
            return
        self._end_running()
        self.transport.write(response)
        self.transport.write_eof()
        self._lingers_until = self.loop.time() + _LINGER_S
        self._linger()
        self.flow.resume_reading()

    def _linger(self) -> None:
        """Reads on for a while what a refused client sends, so that its response is not lost."""
        left = self._lingers_until - self.loop.time()
        self._arm(max(0.0, min(_LINGER_PAUSE_S, left)), self.transport.abort)

    def _is_discarding(self) -> bool:
        """Whether nobody uses what comes: its client is refused, or the body goes on after its response."""
        return self._is_refused or (self._phase is _Phase.BODY and self.cycle.response_complete)

    def _read_later(self) -> None:
        if not self.flow.read_paused:
            self.flow.pause_reading()
            self.loop.call_later(_LINGER_READ_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _end_running(self) -> None:
        """The application learns that no more of the request comes, and what it sends is dropped."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        kind = KIND_OF_PATH.get(cycle.scope["path"]) if cycle.scope["method"] == "POST" else None
        if kind is not None:
            app = partial(self._run_unless_shed, app, kind, self._waits_since)
        super()._start_asgi_task(cycle, app)

    async def _run_unless_shed(
        self, app: ASGI3Application, kind: Kind, since: Instant,
        scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable,
    ) -> None:  # fmt: skip
        """Runs the application unless the request has waited for it too long since `since`.

        An event loop that is late reads many kept-alive connections at once. The first of them have waited in
        the kernel for long, the last ones for their turn among these.
        """
        now = Instant(time.monotonic_ns())
        if self._shedder.sheds(kind, between(since, now), now, self._limits.max_queue_delay):
            app = self._shed_answer
        await app(scope, receive, send)

    def _too_large(self) -> bytes:
        limits = self._limits
        message = (
            "the request line and headers exceed server.limits.max_header_bytes="
            f"{limits.max_header_bytes} or max_headers={limits.max_headers}; send less or raise the limit"
        )
        return raw_response(Failure(431, message, code="headers_too_large"))
