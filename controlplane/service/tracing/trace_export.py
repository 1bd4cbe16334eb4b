"""Follows the section `tracing` of the configuration in force: makes the tracer once a receiver is named.

The tracer needs packages of the extra `otel`, which are imported only then.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from controlplane.config import ConfigError
from controlplane.config.tracing_section import TracingSection
from controlplane.core.clock import Clock
from controlplane.core.ports import EmbeddingPass
from controlplane.service.ticket import Ticket

if TYPE_CHECKING:
    from controlplane.service.tracing.request_tracer import RequestTracer

_TRACER = "controlplane.service.tracing.request_tracer"


def require_exporter(section: TracingSection) -> None:
    """Raises ConfigError if the section names a receiver and the extra `otel` is not installed."""
    if section.endpoint is None:
        return
    try:
        import_module(_TRACER)
    except ModuleNotFoundError as error:
        remedy = "install the extra otel; in a clone: pip install '.[otel]'"
        missing = f"tracing.endpoint: {error.name} is not installed; {remedy}"
        raise ConfigError(missing) from None


class TraceExport:
    """Gives ended requests and embedding passes to the tracer.

    Attributes:
        tracer: None until a receiver was named for the first time.
        active: the tracer while a receiver is named.
    """

    def __init__(self, clock: Clock) -> None:
        self.tracer: RequestTracer | None = None
        self.active: RequestTracer | None = None
        self._clock = clock

    def follow(self, section: TracingSection) -> None:
        """Sends to the receiver of this section from now on, for which `require_exporter` was called.

        Without one, the requests that began before are still sent to the former one.
        """
        if section.endpoint is None:
            self.active = None
            return
        if self.tracer is None:
            from controlplane.service.tracing.request_tracer import RequestTracer

            # It logs every request.
            logging.getLogger("httpx").setLevel(logging.WARNING)
            self.tracer = RequestTracer(section, section.endpoint, self._clock)
            self.tracer.start()
        else:
            self.tracer.send_to(section, section.endpoint)
        self.active = self.tracer

    def request_ended(self, ticket: Ticket) -> None:
        """Queues an ended request if its spans are kept."""
        if self.tracer is not None:
            self.tracer.request_ended(ticket)

    def pass_ended(self, done: EmbeddingPass) -> None:
        """Remembers an embedding pass for the requests whose inputs it held."""
        if self.active is not None:
            self.active.pass_ended(done)

    def close(self) -> None:
        """Exports what is queued."""
        if self.tracer is not None:
            self.tracer.close()
