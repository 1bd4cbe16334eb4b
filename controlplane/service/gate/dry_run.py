"""Renders a dry run of the scheduling cycle: the decision about one request, and the numbers behind it."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.clock import Duration, Instant, to_milliseconds
from controlplane.core.decision import AdmissionDecision, Admit, Defer, Plan, Reject
from controlplane.core.pool_view import Queue, Share, Waiting
from controlplane.policy.gate.admission import Admission, latest_start, predicted_wait


@dataclass(frozen=True, slots=True)
class DryRun:
    """The snapshot of a cycle and its plan, which is not applied. `entry` is the request in question."""

    entry: Waiting
    share: Share
    queue: Queue
    plan: Plan
    admission: Admission
    now: Instant


def render_dry_run(run: DryRun) -> dict[str, object]:
    """The decision as JSON: bytes, tokens, and milliseconds from now.

    `retry_after_ms` is that of the plan; `RetrySpacer` moves it if several requests are rejected.
    """
    entry, share = run.entry, run.share
    request, footprint = entry.request, entry.footprint
    lookahead, ceiling = run.admission.lookahead(share), share.without_reserve(request).ceiling
    ahead = [other for other in run.queue.waiting if other.rank < entry.rank]
    decision = _decision(run)
    if isinstance(decision, Admit):
        wait: Duration | None = decision.wait
    else:
        engine_work = 0.0 if share.engine_work_ahead is None else share.engine_work_ahead(entry)
        wait = predicted_wait(share, lookahead, entry, ahead=share.work(ahead) + engine_work)
    latest = latest_start(request, footprint, share.pace_of(request.model))
    return {
        **_decision_fields(decision),
        "others_refused": [name for name, _ in run.plan.rejections if name != request.id],
        "request": {
            "kind": request.kind.value,
            "class": request.service_class.name,
            "prompt_tokens": request.prompt_tokens,
            "max_output_tokens": request.max_output_tokens,
            "expected_steps": footprint.steps,
        },
        "memory": {
            "ceiling_bytes": ceiling,
            "kept_for_others_bytes": share.ceiling - ceiling,
            "held_bytes": share.held,
            "needs_bytes": footprint.base,
            "may_need_bytes": max(footprint.base, footprint.worst),
            "largest_request_bytes": share.largest,
            "predicted_peak_bytes": round(lookahead.peak_with(footprint)),
        },
        "places": {"running": len(share.leases), "free": share.free_slots},
        "queue": {"others": len(run.queue.waiting) - 1, "before_it": len(ahead)},
        "time": {
            "predicted_wait_ms": _milliseconds(wait),
            "latest_start_ms": _from_now(latest, run.now),
            "decided_within_ms": _from_now(entry.until, run.now),
            "step_ms": None if share.pace is None else _milliseconds(share.pace.step),
        },
    }


def _decision(run: DryRun) -> AdmissionDecision:
    plan = run.plan
    decided: Mapping[str, AdmissionDecision]
    decided = {**dict(plan.dispatches), **dict(plan.deferrals), **dict(plan.rejections)}
    return decided[run.entry.request.id]


def _decision_fields(decision: AdmissionDecision) -> dict[str, object]:
    match decision:
        case Admit(victims=victims):
            decided = "ADMIT_WITH_PREEMPTION" if victims else "ADMIT"
            return {"decision": decided, "reason": None, "victims": [victim.request_id for victim in victims]}
        case Defer(reason=reason):
            return {"decision": "DEFER", "reason": reason.value}
        case Reject(reason=reason, retry_after=after):
            return {"decision": "REJECT", "reason": reason.value, "retry_after_ms": _milliseconds(after)}


def _from_now(at: Instant | None, now: Instant) -> float | None:
    return None if at is None else _milliseconds(Duration(at - now))


def _milliseconds(duration: Duration | None) -> float | None:
    return None if duration is None else round(to_milliseconds(duration), 3)
