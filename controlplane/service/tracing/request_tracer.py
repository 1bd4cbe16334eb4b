"""Chooses the ended requests whose spans are kept, and exports them from a thread of its own.

Every request that missed an objective, was rejected, evicted or preempted, or failed is kept, and of the
others those whose trace is sampled. The event loop only queues the request; a receiver that is slow or away
costs traces and not requests.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.util.re import parse_env_headers

from controlplane import __version__
from controlplane.config.tracing_section import TracingSection
from controlplane.core.clock import Clock, Instant
from controlplane.core.decision import Outcome
from controlplane.core.errors import BackendDown
from controlplane.core.ports import EmbeddingPass
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.service.decision_history import Preempted
from controlplane.service.runtime.health_tracker import HealthTracker
from controlplane.service.ticket import Ticket
from controlplane.service.tracing.request_spans import PassSpan, resource_of, spans_of

_QUEUED_REQUESTS = 2_000
_BATCH_REQUESTS = 200
# An export takes a millisecond, whatever it holds.
_PERIOD_SECONDS = 5.0
_TIMEOUT_SECONDS = 10.0
_ATTEMPTS = 2
_STOP_SECONDS = 10.0
# Passes are remembered of requests that have not ended.
_REQUESTS_WITH_PASSES = 4_096
_PASSES_OF_REQUEST = 64
_UNREMARKABLE = (Outcome.MET, Outcome.ABORTED)
_DEFAULT_PATH = "/v1/traces"

_Kept = tuple[Ticket, Sequence[PassSpan]]


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Where spans are sent, the resource that they are of, and whether they arrive there."""

    url: str
    resource: Resource
    health: HealthTracker = field(
        default_factory=lambda: HealthTracker("spans cannot be exported", "spans are exported again")
    )


class RequestTracer:
    """The tracer of one service.

    Attributes:
        exported: requests whose spans the receiver took.
    """

    def __init__(self, section: TracingSection, endpoint: str, clock: Clock) -> None:
        self.exported = 0
        # One counter for each thread: an addition in one would undo that of the other.
        self._unqueued = self._unsent = 0
        self._receiver = _Receiver(_url(endpoint), _resource(section))
        self._epoch_ns = time.time_ns() - clock.now()
        self._http = httpx.Client(headers=_headers(), timeout=_TIMEOUT_SECONDS)
        self._clock = clock
        self._kept: deque[_Kept] = deque()
        self._passes: OrderedDict[str, list[PassSpan]] = OrderedDict()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._export_queued, name="tracing", daemon=True)

    @property
    def dropped(self) -> int:
        """Requests whose spans were lost: the queue was full, or the receiver did not take them."""
        return self._unqueued + self._unsent

    @property
    def health(self) -> HealthTracker:
        """Whether spans arrive at the present receiver."""
        return self._receiver.health

    def send_to(self, section: TracingSection, endpoint: str) -> None:
        """Sends what is queued, and what ends from now on, to this receiver under the section's names.

        The receiver of the same address keeps its health.
        """
        url, resource = _url(endpoint), _resource(section)
        # Replaced as a whole, since the thread reads it.
        if url == self._receiver.url:
            self._receiver = replace(self._receiver, resource=resource)
        else:
            self._receiver = _Receiver(url, resource)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Exports what is queued; a receiver that does not answer is abandoned after ten seconds."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def request_ended(self, ticket: Ticket) -> None:
        """Queues an ended request if its spans are kept."""
        passes = self._passes.pop(ticket.request.id, ())
        trace = ticket.trace
        if trace is None or not (trace.is_sampled or is_remarkable(ticket)):
            return
        if len(self._kept) >= _QUEUED_REQUESTS:
            self._unqueued += 1
            return
        self._kept.append((ticket, passes))
        if len(self._kept) >= _BATCH_REQUESTS:
            self._wake.set()

    def pass_ended(self, done: EmbeddingPass) -> None:
        """Remembers an embedding pass for the requests whose inputs it held."""
        end = self._clock.now()
        span = PassSpan(Instant(end - done.elapsed), end, done.inputs, done.tokens, done.padded_tokens)
        for request_id in done.requests:
            passes = self._passes.setdefault(request_id, [])
            if len(passes) < _PASSES_OF_REQUEST:
                passes.append(span)
        while len(self._passes) > _REQUESTS_WITH_PASSES:
            self._passes.popitem(last=False)

    def readings(self, metrics: Metrics) -> Readings:
        """Requests exported and dropped."""
        return {metrics.traced_requests: {"exported": self.exported, "dropped": self.dropped}}

    def _export_queued(self) -> None:
        while True:
            self._wake.wait(_PERIOD_SECONDS)
            self._wake.clear()
            while self._kept:
                self._export([self._kept.popleft() for _ in range(min(_BATCH_REQUESTS, len(self._kept)))])
            if self._is_closing:
                self._http.close()
                return

    def _export(self, kept: Sequence[_Kept]) -> None:
        receiver = self._receiver
        try:
            self._send(receiver.url, self._message(kept, receiver.resource))
        except Exception as error:
            # Whatever is wrong with these, the thread goes on: they are counted, and the log says why.
            self._unsent += len(kept)
            receiver.health.failed(error)
        else:
            self.exported += len(kept)
            receiver.health.succeeded()

    def _message(self, kept: Sequence[_Kept], resource: Resource) -> bytes:
        spans = [
            span
            for ticket, passes in kept
            if ticket.trace is not None
            for span in spans_of(ticket, ticket.trace, passes, epoch_ns=self._epoch_ns)
        ]
        of_scope = ScopeSpans(scope=InstrumentationScope(name="tandem", version=__version__), spans=spans)
        of_resource = ResourceSpans(resource=resource, scope_spans=[of_scope])
        message: bytes = ExportTraceServiceRequest(resource_spans=[of_resource]).SerializeToString()
        return message

    def _send(self, url: str, message: bytes) -> None:
        """Sends a message, a second time if the connection was lost. Raises BackendDown."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._http.post(url, content=message)
            except httpx.HTTPError as error:
                if attempt == _ATTEMPTS:
                    raise BackendDown(f"tracing.endpoint={url}: {error or repr(error)}") from error
            else:
                if not answer.is_success:
                    raise BackendDown(f"tracing.endpoint={url}: status {answer.status_code}")
                return


def is_remarkable(ticket: Ticket) -> bool:
    """Whether a request is kept in any case: not served in time, or preempted."""
    return ticket.outcome not in _UNREMARKABLE or any(isinstance(each, Preempted) for each in ticket.history)


def _headers() -> dict[str, str]:
    """Headers of an export: OpenTelemetry's variable, and the content type."""
    stated = parse_env_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""), liberal=True)
    return {**stated, "content-type": "application/x-protobuf"}


def _resource(section: TracingSection) -> Resource:
    return resource_of(section.service_name, os.environ.get("OTEL_RESOURCE_ATTRIBUTES"))


def _url(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _DEFAULT_PATH
