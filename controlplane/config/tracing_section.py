"""Section `tracing`: where the spans of requests are sent, and of how many."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Fraction


@section(frozen=True, config=STRICT)
class TracingSection:
    """OpenTelemetry traces, described in docs/tracing.md; they need the extra `otel`."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2_000)] | None = None
    """URL of an OTLP/HTTP receiver such as `http://127.0.0.1:4318`; v1/traces is added if it has no path.
    Without it nothing is traced. Headers come from the environment variable OTEL_EXPORTER_OTLP_HEADERS."""
    sample: Fraction = 0.1
    """Share of requests whose spans are sent. Requests that were late, rejected, evicted or preempted or that
    failed, and those of a caller that records its trace, are always sent."""
    service_name: Annotated[str, Field(min_length=1, max_length=200)] = "tandem"
    """`service.name` of the spans."""
