"""An OTLP/HTTP receiver in the process of a test; it needs the extra `otel`."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """An OTLP/HTTP receiver in this process; `spans` are those of all exports so far."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.headers = dict(self.headers)
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces" and receiver.status == 200:
                    receiver.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def add(self, exported: Any) -> None:
        for of_resource in exported.resource_spans:
            self.resources.append(values(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def roots(receiver: Receiver) -> list[Any]:
    """The spans of requests without those of their parts."""
    return [span for span in receiver.spans if span.kind == span.SPAN_KIND_SERVER]


def values(attributes: Any) -> dict[str, Any]:
    """The attributes as a dictionary."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )
