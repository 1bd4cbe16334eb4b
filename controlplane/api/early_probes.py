"""Answers probes while the server's modules are imported and the memory is planned.

Both take seconds, in which the server's event loop does not run yet. A thread accepts what comes on the
listening sockets and answers `/health` and `/ready`, one connection at a time. Any other connection is kept,
with all that it has sent, until the server takes it. Imports nothing that takes time.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

IMPORTING, PLANNING = "importing", "memory plan"
"""Stages before those of the models."""
RETRY_SECONDS = 5
_PROBES = (b"GET /health ", b"GET /ready ")
_CONNECTION_SECONDS = 0.5
_MOST_BYTES = 65_536
# The others wait unaccepted; a process may have few descriptors until the server asks for more.
_MOST_KEPT = 256


class EarlyProbeServer:
    """Answers probes on `sockets`, which listen, and keeps all other connections.

    Attributes:
        stage: the present stage of the start, for the response to `/ready`.
        kept: the accepted connections, for the server.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self.stage = IMPORTING
        self.kept: list[socket.socket] = []
        self._sockets = sockets
        self._started = time.monotonic()

    @contextmanager
    def serving(self) -> Iterator["EarlyProbeServer"]:
        """Serves while the block runs."""
        stop, stopped = socket.socketpair()
        with stop, stopped:
            thread = threading.Thread(target=self._serve, args=(stopped,), name="early probes")
            thread.start()
            try:
                yield self
            finally:
                stop.send(b"\0")
                thread.join()

    def _serve(self, stopped: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(stopped, selectors.EVENT_READ)
            for listener in self._sockets:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ, listener)
            while len(self.kept) < _MOST_KEPT:
                ready = [key.data for key, _ in selector.select()]
                if None in ready:
                    return
                for listener in ready:
                    # A client may leave before it is accepted, or during its answer.
                    with suppress(OSError):
                        self._answer_or_keep(listener.accept()[0])

    def _answer_or_keep(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECTION_SECONDS)
        try:
            first_bytes = connection.recv(max(map(len, _PROBES)), socket.MSG_PEEK)
        except TimeoutError:
            first_bytes = None
        if first_bytes is None or (first_bytes and not first_bytes.startswith(_PROBES)):
            connection.setblocking(False)
            self.kept.append(connection)
            return
        with connection:
            if first_bytes:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        head, deadline = b"", time.monotonic() + _CONNECTION_SECONDS
        while b"\r\n\r\n" not in head and len(head) < _MOST_BYTES:
            # A client that sends a byte at a time would hold up the start.
            if time.monotonic() > deadline or not (part := connection.recv(_MOST_BYTES)):
                return
            head += part
        connection.sendall(self.response(is_ready=head.startswith(b"GET /ready ")))

    def response(self, *, is_ready: bool) -> bytes:
        """The response to `/ready`, or else to `/health`; with `connection: close`."""
        if not is_ready:
            return _http(b"200 OK", b'{"status":"alive"}')
        seconds = time.monotonic() - self._started
        message = f"the server is starting ({self.stage} for {seconds:.1f} s); retry after {RETRY_SECONDS} s"
        error = {"message": message, "type": "server_error", "param": None, "code": "starting"}
        body = {"status": "starting", "seconds": round(seconds, 1), "parts": {}, "error": error}
        retry = f"retry-after: {RETRY_SECONDS}\r\n".encode()
        return _http(b"503 Service Unavailable", json.dumps(body).encode(), retry)


def _http(status: bytes, body: bytes, headers: bytes = b"") -> bytes:
    fixed = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return b"HTTP/1.1 %s\r\n%s%s\r\n%s" % (status, fixed, headers, body)
