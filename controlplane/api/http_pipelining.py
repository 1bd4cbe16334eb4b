"""Reads few of the requests that a client sends ahead; the others wait in the client until it is their turn.

uvicorn parses all that one read of up to 256 KiB has: 14,000 short requests.
"""

import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from controlplane.api.http_upgrades import UpgradeIgnoringProtocol

# Requests behind the one in progress that are parsed.
_MAX_AHEAD = 16
# A request has two line feeds at least. A read with more than so many is parsed in pieces, as which it may
# have 14 requests for each 256 bytes.
_FEW_LINES, _PIECE_BYTES = 64, 1_024
# How often the kernel is asked whether the client of a held connection is still there, and its answer if so,
# in the first byte of struct tcp_info.
_LOOK_S, _ESTABLISHED = 1.0, 1


class _HeldFlow(FlowControl):
    """The flow control of a connection that does not read on while `is_held`."""

    def __init__(self, transport: Transport, is_held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held

    def resume_reading(self) -> None:
        """Reads on unless the connection is held; then it reads on later."""
        if not self._is_held():
            super().resume_reading()


class PipeliningProtocol(UpgradeIgnoringProtocol):
    """One connection. Of what a client has sent ahead, one read at most is kept unparsed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unread = bytearray()
        self._refusal: bytes | None = None
        self._look_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begins the connection."""
        super().connection_made(transport)
        self.flow = _HeldFlow(transport, self._is_held)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops what is unparsed."""
        self._unread.clear()
        self._refusal = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses the bytes, or keeps those behind too many requests, or drops those behind a refused one."""
        if self._refusal is not None:
            return
        if self._is_refused or (not self._is_full() and data.count(b"\n") <= _FEW_LINES):
            super().data_received(data)
            if self._refusal is not None:
                self._hold()
            return
        self._unread += data
        self._parse_on()

    def on_response_complete(self) -> None:
        """Starts the next request and parses one behind it, or refuses the one that is to be refused."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._unread:
            self._parse_on()
            self.flow.resume_reading()
        elif self._refusal is not None and not self._is_answering():
            response, self._refusal = self._refusal, None
            super()._refuse(response)

    def _refuse(self, response: bytes) -> None:
        """Refuses a request, once those before it are answered."""
        if self._refusal is not None:
            return
        is_begun = self.cycle is not None and self.cycle.scope is self.scope and self.cycle.more_body
        if not self._is_answering() or (is_begun and self.cycle is self._running):
            super()._refuse(response)
            return
        if is_begun:
            self.pipeline.popleft()
        self._refusal = response
        self._unread.clear()
        # Of a refusal by a time limit; while data is parsed, its time is set after it.
        self._hold()

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _is_full(self) -> bool:
        return len(self.pipeline) >= _MAX_AHEAD

    def _parse_on(self) -> None:
        """Parses pieces until enough requests wait; then the time limits of the client end."""
        while self._unread and not self._is_full():
            piece = bytes(self._unread[:_PIECE_BYTES])
            del self._unread[:_PIECE_BYTES]
            super().data_received(piece)
            if self._is_refused:
                self._unread.clear()
        if self._is_held():
            self._hold()

    def _is_held(self) -> bool:
        return bool(self._unread) or self._refusal is not None

    def _hold(self) -> None:
        """Reads nothing, and looks in a while whether the client has left, since that would be read."""
        self.flow.pause_reading()
        self._disarm()
        if self._look_timer is None:
            self._look_timer = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._look_timer = None
        if not self._is_held() or self.transport.is_closing():
            return
        (state,) = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state == _ESTABLISHED:
            self._hold()
        else:
            self.transport.abort()
