"""Renders decisions as JSON: of a dry run now, and all of an open or ended request with its outcome."""

from collections.abc import Mapping
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
        **_rendered(decided[entry.request.id]),
        "others_refused": [name for name, _ in plan.rejections if name != entry.request.id],
        "request": {**_size(entry.request), "expected_steps": entry.footprint.steps},
        "queue": {
            "others": len(run.queue.waiting) - 1,
            "before_it": sum(other.rank < entry.rank for other in run.queue.waiting),
        },
        **_numbers(run.basis, decided[entry.request.id].wait, run.now),
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
            "model": request.model,
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
            **{f"{name}_ms": _milliseconds(value) for name, value in timeline.measured().items()},
            "longest_gap_ms": _milliseconds(timeline.longest_gap),
            "output_tokens": timeline.output_tokens,
            "cached_tokens": ticket.cached_tokens,
            "preemptions": {"gate": by.count("gate"), "engine": by.count("engine")},
        },
    }


def _event(event: Decided | Preempted, arrival: Instant) -> dict[str, object]:
    at = {"at_ms": _milliseconds(between(arrival, event.at))}
    if isinstance(event, Preempted):
        cost = {"recompute_tokens": event.recompute_tokens, "recompute_ms": _milliseconds(event.recompute)}
        return {**at, "decision": "PREEMPTED", "by": event.by, "for": event.beneficiary, **cost}
    numbers = {} if event.basis is None else _numbers(event.basis, event.decision.wait, event.at)
    return {**at, **_rendered(event.decision), "config_version": event.version, **numbers}


def _size(request: Request) -> dict[str, object]:
    return {
        "kind": request.kind.value,
        "class": request.service_class.name,
        "prompt_tokens": request.prompt_tokens,
        "max_output_tokens": request.max_output_tokens,
    }


def _rendered(decision: AdmissionDecision) -> dict[str, object]:
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


def _numbers(basis: Basis, wait: Duration | None, now: Instant) -> dict[str, object]:
    """The numbers behind a decision at `now`; times count from there."""
    entry, share = basis.entry, basis.share
    request, footprint = entry.request, entry.footprint
    ceiling = share.ceiling
    peak = LookAhead(share.leases).peak_with(footprint)
    latest = latest_start(request, footprint, share.pace_of(request.model))
    return {
        "memory": {
            "ceiling_bytes": ceiling,
            "held_bytes": share.held,
            "needs_bytes": footprint.base,
            "may_need_bytes": max(footprint.base, footprint.worst),
            "largest_request_bytes": share.largest,
            "predicted_peak_bytes": round(peak),
        },
        "places": {"running": len(share.leases), "free": share.free_slots},
        "time": {
            "predicted_wait_ms": _milliseconds(wait),
            "latest_start_ms": None if latest is None else _milliseconds(between(now, latest)),
            "decided_within_ms": None if entry.until is None else _milliseconds(between(now, entry.until)),
            "step_ms": _milliseconds(share.pace.step) if share.pace else None,
            "decode_step_ms": _milliseconds(basis.step),
            "decode_step_with_it_ms": _milliseconds(basis.step_with),
            "tightest_tpot_ms": _milliseconds(basis.tpot),
        },
    }


def _milliseconds(duration: Duration | None) -> float | None:
    return None if duration is None else round(to_milliseconds(duration), 3)
