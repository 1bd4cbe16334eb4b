"""Answers probes while the server's modules are imported and the memory is planned.

Both take seconds, in which the server's event loop does not run yet. A thread accepts what comes on the
sockets of `server.port` and answers `/health` and `/ready`, one connection at a time. Any other connection is
kept, with all that it has sent, until the server takes it. Another thread does so for `server.health_port`,
which keeps none. Imports nothing that takes time.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

IMPORTING, PLANNING = "importing", "memory plan"
"""Stages before those of the models."""
RETRY_SECONDS = 5
UNKNOWN_PATH = "no such path; this port serves GET /health and /ready"
"""Message of the 404 on `server.health_port`."""
_PROBES = (b"GET /health ", b"GET /ready ")
_CONNECTION_SECONDS = 0.5
_MOST_BYTES = 65_536
# The others wait unaccepted; a process may have few descriptors until the server asks for more.
_MOST_KEPT = 256


class EarlyProbeServer:
    """Answers probes on `sockets`, which listen, and keeps all other connections.

    On `probe_sockets`, which listen too, it answers every request and keeps none.

    Attributes:
        stage: the present stage of the start, for the response to `/ready`.
        kept: the accepted connections, for the server.
    """

    def __init__(self, sockets: Sequence[socket.socket], probe_sockets: Sequence[socket.socket] = ()) -> None:
        self.stage = IMPORTING
        self.kept: list[socket.socket] = []
        self._sockets = sockets
        self._probe_sockets = probe_sockets
        self._started = time.monotonic()

    @contextmanager
    def serving(self) -> Iterator["EarlyProbeServer"]:
        """Serves while the block runs."""
        stop, stopped = socket.socketpair()
        with stop, stopped:
            # Clients of one port do not delay probes on the other.
            threads = [
                threading.Thread(target=partial(self._serve, stopped, listeners, keeps=keeps))
                for listeners, keeps in ((self._sockets, True), (self._probe_sockets, False))
            ]
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                # It stays readable, so that each thread finds it.
                stop.send(b"\0")
                for thread in threads:
                    thread.join()

    def _serve(self, stopped: socket.socket, sockets: Sequence[socket.socket], *, keeps: bool) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(stopped, selectors.EVENT_READ)
            for listener in sockets:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ, listener)
            while not keeps or len(self.kept) < _MOST_KEPT:
                ready = [key.data for key, _ in selector.select()]
                if None in ready:
                    return
                for listener in ready:
                    # A client may leave before it is accepted, or during its answer.
                    with suppress(OSError):
                        self._take(listener.accept()[0], keeps=keeps)

    def _take(self, connection: socket.socket, *, keeps: bool) -> None:
        connection.settimeout(_CONNECTION_SECONDS)
        if keeps and not _may_be_probe(connection):
            connection.setblocking(False)
            self.kept.append(connection)
            return
        with connection:
            head, deadline = b"", time.monotonic() + _CONNECTION_SECONDS
            while b"\r\n\r\n" not in head and len(head) < _MOST_BYTES:
                # A client that sends a byte at a time would hold up the start.
                if time.monotonic() > deadline or not (part := connection.recv(_MOST_BYTES)):
                    return
                head += part
            connection.sendall(self.response(head))

    def response(self, request: bytes) -> bytes:
        """The response to a request, of which only the first line is read; with `connection: close`."""
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD") or path not in (b"/health", b"/ready"):
            error = {"message": UNKNOWN_PATH, "type": "invalid_request_error", "param": None}
            response = _http(b"404 Not Found", {"error": {**error, "code": "not_found"}})
        elif path == b"/health":
            response = _http(b"200 OK", {"status": "alive"})
        else:
            response = self._not_ready()
        return response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == b"HEAD" else response

    def _not_ready(self) -> bytes:
        seconds = time.monotonic() - self._started
        message = f"the server is starting ({self.stage} for {seconds:.1f} s); retry after {RETRY_SECONDS} s"
        error = {"message": message, "type": "server_error", "param": None, "code": "starting"}
        body = {"status": "starting", "seconds": round(seconds, 1), "parts": {}, "error": error}
        retry = f"retry-after: {RETRY_SECONDS}\r\nretry-after-ms: {1_000 * RETRY_SECONDS}\r\n"
        return _http(b"503 Service Unavailable", body, retry.encode())


def _may_be_probe(connection: socket.socket) -> bool:
    """Whether its first bytes are those of a probe, or its client has left."""
    try:
        first_bytes = connection.recv(max(map(len, _PROBES)), socket.MSG_PEEK)
    except TimeoutError:
        return False
    return not first_bytes or first_bytes.startswith(_PROBES)


def _http(status: bytes, content: Mapping[str, object], headers: bytes = b"") -> bytes:
    body = json.dumps(content).encode()
    fixed = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return b"HTTP/1.1 %s\r\n%s%s\r\n%s" % (status, fixed, headers, body)
