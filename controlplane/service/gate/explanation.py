"""Renders decisions as JSON: of a dry run now, and all of an open or ended request with its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

from controlplane.core.clock import Duration, Instant, between, to_milliseconds
from controlplane.core.decision import AdmissionDecision, Admit, Defer, Outcome, Plan, Reject
from controlplane.core.pool_view import Queue
from controlplane.core.request import Request
from controlplane.policy.gate.admission import latest_start
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.service.decision_history import Basis, Decided, Preempted
from controlplane.service.ticket import Ticket

_LEVELS = (0.1, 0.5, 0.9)
NUMBERS: Mapping[str, Sequence[str]] = {
    "memory": (
        "ceiling_bytes", "held_bytes", "needs_bytes", "may_need_bytes", "largest_request_bytes",
        "predicted_peak_bytes",
    ),
    "places": ("running", "free"),
    "time": (
        "predicted_wait_ms", "latest_start_ms", "decided_within_ms", "step_ms", "decode_step_ms",
        "decode_step_with_it_ms", "tightest_tpot_ms",
    ),
}  # fmt: skip
"""The numbers behind a decision, by group."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of a cycle that is not applied, and its basis for the request in question."""

    basis: Basis
    queue: Queue
    plan: Plan
    now: Instant


def render_dry_run(run: DryRun) -> dict[str, object]:
    """The decision as JSON: bytes, tokens, and milliseconds from now.

    `retry_after_ms` is that of the plan; `RetrySpacer` moves it if several requests are rejected.
    """
    entry, plan = run.basis.entry, run.plan
    decided: Mapping[str, AdmissionDecision]
    decided = {**dict(plan.dispatches), **dict(plan.deferrals), **dict(plan.rejections)}
    return {
        **rendered_decision(decided[entry.request.id]),
        "others_refused": [name for name, _ in plan.rejections if name != entry.request.id],
        "request": {**_size(entry.request), "expected_steps": entry.footprint.steps},
        "queue": {
            "others": len(run.queue.waiting) - 1,
            "before_it": sum(other.rank < entry.rank for other in run.queue.waiting),
        },
        **named_numbers(decision_numbers(run.basis, decided[entry.request.id].wait, run.now)),
    }


def render_history(ticket: Ticket, now: Instant) -> dict[str, object]:
    """All decisions on a request, what was predicted and what came of it; times count from its arrival.

    The numbers of a decision are those of the snapshot that its cycle began with.
    """
    request, timeline, length = ticket.request, ticket.timeline, ticket.first_forecast
    quantiles = None if length is None else {f"{q:g}": round(length.quantile(q), 1) for q in _LEVELS}
    by = [event.by for event in ticket.history if isinstance(event, Preempted)]
    is_late = ticket.outcome is Outcome.LATE
    return {
        "id": request.id,
        "arrived_ms_ago": _milliseconds(between(request.arrival, now)),
        "phase": ticket.phase.value,
        "outcome": None if ticket.outcome is None else ticket.outcome.value,
        "missed": [name for name, met in timeline.objectives_met(request.slo).items() if is_late and not met],
        "request": {
            **_size(request),
            "model": request.name_of_model,
            "tenant": request.tenant,
            "priority": request.service_class.priority,
            "objectives_ms": {
                name: _milliseconds(value) for name, value in asdict(request.slo).items() if value is not None
            },
        },
        "decisions": [
            _event(event, request.arrival) for event in sorted(ticket.history, key=attrgetter("at"))
        ],
        "predicted": {
            "ttft_ms": _milliseconds(ticket.predicted_ttft),
            "ttft_upper_ms": _milliseconds(ticket.predicted_ttft_upper),
            "output_tokens": None if length is None else {"mean": round(length.mean, 1), **(quantiles or {})},
        },
        "measured": {
            "queue_ms": _milliseconds(timeline.queue),
            **{f"{name}_ms": _milliseconds(value) for name, value in timeline.measured(request.kind).items()},
            "output_tokens": timeline.output_tokens,
            "cached_tokens": ticket.cache_hit_tokens,
            "preemptions": {"gate": by.count("gate"), "engine": by.count("engine")},
        },
    }


def _event(event: Decided | Preempted, arrival: Instant) -> dict[str, object]:
    at = {"at_ms": _milliseconds(between(arrival, event.at))}
    if isinstance(event, Preempted):
        cost = {"recompute_tokens": event.recompute_tokens, "recompute_ms": _milliseconds(event.recompute)}
        return {**at, "decision": "PREEMPTED", "by": event.by, "for": event.beneficiary, **cost}
    found: dict[str, object] = {**at, **rendered_decision(event.decision), "config_version": event.version}
    if event.basis is not None:
        found |= named_numbers(decision_numbers(event.basis, event.decision.wait, event.at))
    return found


def _size(request: Request) -> dict[str, object]:
    return {
        "kind": request.kind.value,
        "class": request.service_class.name,
        "prompt_tokens": request.prompt_tokens,
        "max_output_tokens": request.max_output_tokens,
    }


def rendered_decision(decision: AdmissionDecision) -> dict[str, object]:
    """The decision as JSON, without its numbers."""
    match decision:
        case Admit(victims=victims):
            decided = "ADMIT_WITH_PREEMPTION" if victims else "ADMIT"
            return {"decision": decided, "reason": None, "victims": [victim.request_id for victim in victims]}
        case Defer(reason=reason):
            return {"decision": "DEFER", "reason": reason.value}
        case Reject(reason=reason, retry_after=after, detail=detail):
            rejected: dict[str, object]
            rejected = {"decision": "REJECT", "reason": reason.value, "retry_after_ms": _milliseconds(after)}
            return rejected | ({"detail": detail} if detail else {})


def decision_numbers(
    basis: Basis, wait: Duration | None, now: Instant, *, predicts_peak: bool = True
) -> list[float | None]:
    """The numbers behind a decision at `now` in the order of `NUMBERS`; times count from there.

    Without `predicts_peak` the predicted peak of memory, which takes most of the time, is None.
    """
    entry, share = basis.entry, basis.share
    request, footprint = entry.request, entry.footprint
    latest = latest_start(request, footprint, share.pace_of(request.model))
    return [
        share.ceiling,
        share.held,
        footprint.base,
        max(footprint.base, footprint.worst),
        share.largest,
        round(LookAhead(share.leases).peak_with(footprint)) if predicts_peak else None,
        len(share.leases),
        share.free_slots,
        _milliseconds(wait),
        None if latest is None else _milliseconds(between(now, latest)),
        None if entry.until is None else _milliseconds(between(now, entry.until)),
        _milliseconds(share.pace.step) if share.pace else None,
        _milliseconds(basis.step),
        _milliseconds(basis.step_with),
        _milliseconds(basis.tpot),
    ]


def named_numbers(values: Sequence[float | None]) -> dict[str, object]:
    """The numbers of `decision_numbers` by group and name."""
    rest = iter(values)
    return {group: {name: next(rest) for name in names} for group, names in NUMBERS.items()}


def _milliseconds(duration: Duration | None) -> float | None:
    return None if duration is None else round(to_milliseconds(duration), 3)
