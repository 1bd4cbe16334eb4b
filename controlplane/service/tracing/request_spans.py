"""Builds the spans of one ended request from its timeline, its decisions and its preemptions.

The span of the request has the names of OpenTelemetry's GenAI conventions (semantic-conventions-genai,
development) and, for times and token counts, also those that vLLM's own traces use. What neither has begins
with `tandem.`. Spans are OTLP messages at once: by way of the SDK's spans a request takes two thirds
more time. No text of a prompt or an answer is in a span.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from controlplane import __version__
from controlplane.core.clock import Duration, Instant, to_milliseconds, to_seconds
from controlplane.core.decision import Admit, Defer, Outcome, Reject
from controlplane.core.request import Kind
from controlplane.service.decision_history import Decided, Preempted
from controlplane.service.request_trace import RequestTrace, new_span_id
from controlplane.service.ticket import Ticket

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v2/chat": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/embed": "embeddings",
    "/": "embeddings",
}
_SERVED = (Outcome.MET, Outcome.LATE, Outcome.ABORTED)

# Attributes with the same few values in most spans.
_REPEATED = frozenset(
    {
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model",
        "gen_ai.request.max_tokens", "gen_ai.request.choice.count", "gen_ai.request.n", "tandem.outcome",
        "tandem.class", "tandem.priority", "tandem.tenant", "tandem.preemptions", "tandem.config_version",
        "tandem.decision", "tandem.decision.reason", "error.type",
    }
)  # fmt: skip

Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PassSpan:
    """An embedding pass that held inputs of a request."""

    start: Instant
    end: Instant
    inputs: int
    tokens: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a request's time."""

    name: str
    start: Instant
    end: Instant
    attributes: Attributes


def spans_of(
    ticket: Ticket, trace: RequestTrace, passes: Sequence[PassSpan] = (), *, epoch_ns: int
) -> list[Span]:
    """The span of an ended request, and below it those of its parts in their order.

    `epoch_ns` is the Unix time of the clock's zero.
    """
    end = ticket.timeline.finished
    assert end is not None
    span_id, error, operation = trace.take_span_id(), _error(ticket), _operation(ticket, trace)
    whole = _Part(
        f"{operation} {ticket.request.name_of_model}",
        ticket.request.arrival,
        end,
        {"gen_ai.operation.name": operation, **_attributes(ticket), **error},
    )
    root = _span(whole, trace, span_id, trace.parent_id, epoch_ns)
    root.kind = Span.SPAN_KIND_SERVER
    for each in ticket.history:
        name, attributes = _event(each)
        event = root.events.add(name=name, time_unix_nano=each.at + epoch_ns)
        _add(event.attributes, attributes)
    if error:
        root.status.code, root.status.message = Status.STATUS_CODE_ERROR, error["error.type"]
    parts = _parts(ticket, passes, end)
    return [root, *(_span(part, trace, new_span_id(), span_id, epoch_ns) for part in parts)]


def _span(part: _Part, trace: RequestTrace, span_id: int, parent_id: int | None, epoch_ns: int) -> Span:
    # Setting fields takes half as long as passing them to the constructor.
    span = Span()
    span.trace_id = trace.trace_id.to_bytes(16)
    span.span_id = span_id.to_bytes(8)
    span.parent_span_id = b"" if parent_id is None else parent_id.to_bytes(8)
    span.name = part.name
    span.kind = Span.SPAN_KIND_INTERNAL
    span.start_time_unix_nano = part.start + epoch_ns
    span.end_time_unix_nano = part.end + epoch_ns
    _add(span.attributes, part.attributes)
    return span


def resource_of(service_name: str, stated: str | None) -> Resource:
    """The resource of all spans; `stated` are further attributes as `name=value,...`, percent-encoded."""
    pairs = [pair.partition("=") for pair in (stated or "").split(",") if "=" in pair]
    further = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    own = {"service.name": service_name, "service.version": __version__}
    resource = Resource()
    _add(resource.attributes, {**further, **own})
    return resource


def _add(to: Any, attributes: Attributes) -> None:
    """Adds attributes to a repeated field of KeyValue messages; those without a value are left out."""
    for key, value in attributes.items():
        if value is None:
            continue
        if key in _REPEATED:
            to.append(_repeated(key, value))
        else:
            _set(to.add(key=key).value, value)


@lru_cache(maxsize=1_000)
def _repeated(key: str, value: str | int) -> KeyValue:
    found = KeyValue(key=key)
    _set(found.value, value)
    return found


def _set(to: AnyValue, value: Any) -> None:
    # By exact type: a trace has dozens of values.
    kind = type(value)
    if kind is str:
        to.string_value = value
    elif kind is int:
        to.int_value = value
    elif kind is float:
        to.double_value = value
    else:
        for each in value:
            _set(to.array_value.values.add(), each)


def _operation(ticket: Ticket, trace: RequestTrace) -> str:
    if (named := _OPERATIONS.get(trace.path)) is not None:
        return named
    return "rerank" if ticket.request.kind is Kind.EMBED else "text_completion"


def _attributes(ticket: Ticket) -> dict[str, Any]:
    request, timeline = ticket.request, ticket.timeline
    measured = {name: _seconds(took) for name, took in timeline.measured(request.kind).items()}
    input_tokens, output_tokens = request.prompt_tokens, timeline.output_tokens * request.choices
    is_chat = request.kind is Kind.GENERATE
    choices = request.choices if request.choices > 1 else None
    objectives = timeline.objectives_met(request.slo)
    found: dict[str, Any] = {
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": request.name_of_model,
        "gen_ai.response.model": request.name_of_model,
        "gen_ai.request.id": request.id,
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.prompt_tokens": input_tokens,
        "gen_ai.latency.time_in_queue": _seconds(timeline.queue),
        "gen_ai.latency.e2e": measured["e2e"],
        "tandem.outcome": None if ticket.outcome is None else ticket.outcome.value,
        "tandem.missed": [name for name, is_met in objectives.items() if not is_met] or None,
        "tandem.class": request.service_class.name,
        "tandem.priority": request.service_class.priority,
        "tandem.tenant": request.tenant,
        "tandem.preemptions": sum(isinstance(event, Preempted) for event in ticket.history) or None,
        "tandem.predicted_ttft_s": _seconds(ticket.predicted_ttft),
        "tandem.config_version": next(
            (event.version for event in reversed(ticket.history) if isinstance(event, Decided)), None
        ),
    }
    if is_chat:
        found |= {
            "gen_ai.request.max_tokens": request.max_output_tokens,
            "gen_ai.request.choice.count": choices,
            "gen_ai.request.n": choices,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.completion_tokens": output_tokens,
            "gen_ai.usage.cache_read.input_tokens": ticket.cache_hit_tokens or None,
            "gen_ai.latency.time_to_first_token": _seconds(timeline.ttft),
            "gen_ai.response.time_to_first_chunk": _seconds(timeline.ttft),
            "tandem.tpot_s": measured["tpot"],
        }
    return found


def _error(ticket: Ticket) -> dict[str, str]:
    """The attribute of a request that was not served: the reason of its rejection, or else its outcome."""
    if ticket.outcome is None or ticket.outcome in _SERVED:
        return {}
    last = next((event for event in reversed(ticket.history) if isinstance(event, Decided)), None)
    rejection = last.decision if last is not None and isinstance(last.decision, Reject) else None
    return {"error.type": ticket.outcome.value if rejection is None else rejection.reason.value}


def _parts(ticket: Ticket, passes: Sequence[PassSpan], end: Instant) -> Iterator[_Part]:
    timeline, request = ticket.timeline, ticket.request
    dispatched, first = timeline.dispatched, timeline.first_token
    yield _Part("queue", request.arrival, dispatched or end, {})
    if dispatched is None:
        return
    if request.kind is Kind.EMBED:
        yield _Part("embed", dispatched, end, {"tandem.inputs": len(ticket.input_lengths)})
        for each in passes:
            sizes = {"inputs": each.inputs, "tokens": each.tokens, "padded_tokens": each.padded_tokens}
            attributes = {f"tandem.pass.{name}": size for name, size in sizes.items()}
            yield _Part("embedding pass", each.start, each.end, attributes)
        return
    prefill_end = first or end
    computed = {"tandem.computed_tokens": request.prompt_tokens - ticket.cache_hit_tokens}
    yield _Part("prefill", dispatched, prefill_end, computed)
    if first is not None:
        decoded = {"gen_ai.usage.output_tokens": timeline.output_tokens * request.choices}
        yield _Part("decode", first, timeline.last_token or end, decoded)
    for event, resumed in _preemptions(ticket, end):
        yield _Part("preempted", event.at, resumed, _event(event)[1])


def _preemptions(ticket: Ticket, end: Instant) -> Iterator[tuple[Preempted, Instant]]:
    """Each preemption by the gate with the time at which the request was admitted again, or ended."""
    for number, event in enumerate(ticket.history):
        if not isinstance(event, Preempted) or event.by != "gate":
            continue
        later = (each for each in ticket.history[number + 1 :] if isinstance(each, Decided))
        yield event, next((each.at for each in later if isinstance(each.decision, Admit)), end)


def _event(event: Decided | Preempted) -> tuple[str, dict[str, Any]]:
    if isinstance(event, Preempted):
        return "preemption", {
            "tandem.preempted.by": event.by,
            "tandem.preempted.for": event.beneficiary,
            "tandem.preempted.recompute_tokens": event.recompute_tokens,
            "tandem.preempted.freed_bytes": event.freed_bytes,
        }
    decision = event.decision
    found: dict[str, Any] = {
        "tandem.decision": type(decision).__name__.lower(),
        "tandem.decision.predicted_wait_ms": None
        if decision.wait is None
        else to_milliseconds(decision.wait),
    }
    match decision:
        case Admit(victims=victims):
            found["tandem.decision.victims"] = [victim.request_id for victim in victims] or None
        case Defer(reason=reason):
            found["tandem.decision.reason"] = reason.value
        case Reject(reason=reason, retry_after=retry):
            found["tandem.decision.reason"] = reason.value
            found["tandem.decision.retry_after_ms"] = None if retry is None else to_milliseconds(retry)
    return "decision", found


def _seconds(duration: Duration | None) -> float | None:
    return None if duration is None else to_seconds(duration)
