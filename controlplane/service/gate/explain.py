"""What would be decided about this request now, and from which numbers? The gate's own cycle was asked."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.clock import Duration, Instant, to_milliseconds
from controlplane.core.decision import AdmissionDecision, Admit, Defer, Plan, Reject
from controlplane.core.view import Queue, Share, Waiting
from controlplane.policy.gate.admission import Admission, latest_start, predicted_wait


@dataclass(frozen=True, slots=True)
class DryRun:
    """What the cycle saw, and its `plan`, which nobody carries out. `entry` is the one asked about."""

    entry: Waiting
    share: Share
    queue: Queue
    plan: Plan
    admission: Admission
    now: Instant


def render_dry_run(run: DryRun) -> dict[str, object]:
    """For a person: bytes, tokens, and milliseconds from now. Those who are refused together are told to come
    back one after the other; here stands the first such time."""
    place, share = run.entry, run.share
    request, footprint = place.request, place.footprint
    look, ceiling = run.admission.lookahead(share), share.as_seen_by(request).ceiling
    before = [one for one in run.queue.waiting if one.rank < place.rank]
    decision = _decision(run)
    if isinstance(decision, Admit):
        wait: Duration | None = decision.wait
    else:
        inside = 0.0 if share.inside is None else share.inside(place)
        wait = predicted_wait(share, look, place, ahead=share.work(before) + inside)
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
            "predicted_peak_bytes": round(look.peak_with(footprint)),
        },
        "places": {"running": len(share.leases), "free": share.free_slots},
        "queue": {"others": len(run.queue.waiting) - 1, "before_it": len(before)},
        "time": {
            "predicted_wait_ms": _milliseconds(wait),
            "latest_start_ms": _from_now(latest, run.now),
            "decided_within_ms": _from_now(place.until, run.now),
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
            said = "ADMIT_WITH_PREEMPTION" if victims else "ADMIT"
            return {"decision": said, "reason": None, "victims": [victim.request_id for victim in victims]}
        case Defer(reason=reason):
            return {"decision": "DEFER", "reason": reason.value}
        case Reject(reason=reason, retry_after=after):
            return {"decision": "REJECT", "reason": reason.value, "retry_after_ms": _milliseconds(after)}


def _from_now(at: Instant | None, now: Instant) -> float | None:
    return None if at is None else _milliseconds(Duration(at - now))


def _milliseconds(duration: Duration | None) -> float | None:
    return None if duration is None else round(to_milliseconds(duration), 3)
