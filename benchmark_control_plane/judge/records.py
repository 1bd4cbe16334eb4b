"""How did each request go, as its client saw it? One record a request, judged by its class's objectives.

Rule: every latency counts from the moment the request was planned to be sent, not from when it was: a
client that falls behind makes requests late, it does not hide them. A request that was never answered is
a miss. Times are seconds from the start of the measured window.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

_EVICTED = ("evicted", "preempted")
_CUT_OFF = "given up when the drain ended"


@dataclass(slots=True)
class PartialResponse:
    """What has come back so far, on the runner's clock. `loss` is set when it ended badly."""

    sent: float | None = None
    tokens: list[float] = field(default_factory=list)
    ended: float | None = None
    status: int | None = None
    output_tokens: int | None = None
    decision: str | None = None
    loss: Outcome | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SloTargets:
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def stated(self) -> dict[str, float]:
        both = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: value for name, value in both.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RequestRecord:
    planned: PlannedRequest
    scheduled: float
    sent: float | None
    first: float | None
    last: float | None
    tokens: Sequence[float]
    output_tokens: int
    outcome: Outcome
    ttft_ms: float | None
    tpot_ms: float | None
    max_tbt_ms: float | None
    e2e_ms: float | None
    status: int | None
    decision: str | None
    error: str | None

    def to_json(self, run: int) -> dict[str, Any]:
        one = self.planned
        return {
            "run": run, "id": one.id, "kind": str(one.kind), "class": one.service_class, "tenant": one.tenant,
            "scheduled_s": _rounded(self.scheduled), "sent_s": _rounded(self.sent),
            "first_s": _rounded(self.first), "last_s": _rounded(self.last),
            "token_s": [_rounded(at) for at in self.tokens] or None,
            "prompt_tokens": one.prompt_tokens, "output_tokens": self.output_tokens,
            "inputs": len(one.lengths), "outcome": self.outcome.name,
            "ttft_ms": _rounded(self.ttft_ms), "tpot_ms": _rounded(self.tpot_ms),
            "max_tbt_ms": _rounded(self.max_tbt_ms), "e2e_ms": _rounded(self.e2e_ms),
            "status": self.status, "decision": self.decision, "error": self.error, "warmup": one.is_warmup,
        }  # fmt: skip


def judge_response(
    planned: PlannedRequest, scheduled: float, answer: PartialResponse, origin: float, objective: SloTargets
) -> RequestRecord:
    """`scheduled` and the answer's times are on the runner's clock; the window starts at `origin`."""
    first = answer.tokens[0] if answer.tokens else None
    last = answer.tokens[-1] if answer.tokens else None
    count = answer.output_tokens or len(answer.tokens)
    ended = answer.ended if planned.kind is Kind.EMBED else last
    is_whole = answer.loss is None and answer.ended is not None
    answered = first if planned.kind is Kind.GENERATE else ended
    took = {
        "ttft_ms": None if answered is None else 1e3 * (answered - scheduled),
        "tpot_ms": 1e3 * (last - first) / (count - 1) if first is not None and last is not None and count > 1
        else None,
        "e2e_ms": 1e3 * (ended - scheduled) if is_whole and ended is not None else None,
    }  # fmt: skip
    gaps = [1e3 * (after - before) for before, after in zip(answer.tokens, answer.tokens[1:], strict=False)]
    outcome = answer.loss or (Outcome.MET if _is_kept(took, objective) else Outcome.LATE)

    def relative(at: float | None) -> float | None:
        return None if at is None else at - origin

    return RequestRecord(
        planned=planned, scheduled=scheduled - origin, sent=relative(answer.sent), first=relative(first),
        last=relative(ended), tokens=[at - origin for at in answer.tokens],
        output_tokens=count if planned.kind is Kind.GENERATE else 0, outcome=outcome,
        ttft_ms=took["ttft_ms"] if planned.kind is Kind.GENERATE else None,
        tpot_ms=took["tpot_ms"], max_tbt_ms=max(gaps, default=None), e2e_ms=took["e2e_ms"],
        status=answer.status, decision=answer.decision, error=answer.error,
    )  # fmt: skip


def judge_unfinished(
    planned: PlannedRequest,
    scheduled: float,
    answer: PartialResponse,
    origin: float,
    now: float,
    objective: SloTargets,
) -> RequestRecord:
    """Given up at `now`: late if its promise was broken by then, else the client left too early to tell."""
    answer.loss = Outcome.LATE if _is_broken(planned, scheduled, answer, now, objective) else Outcome.ABORTED
    answer.error = _CUT_OFF
    return judge_response(planned, scheduled, answer, origin, objective)


def _is_broken(
    planned: PlannedRequest, scheduled: float, answer: PartialResponse, now: float, objective: SloTargets
) -> bool:
    if objective.e2e_ms is not None and 1e3 * (now - scheduled) > objective.e2e_ms:
        return True
    if planned.kind is Kind.EMBED or not answer.tokens:
        return objective.ttft_ms is not None and 1e3 * (now - scheduled) > objective.ttft_ms
    first = answer.tokens[0]
    if objective.ttft_ms is not None and 1e3 * (first - scheduled) > objective.ttft_ms:
        return True
    gaps = max(1, planned.output_tokens - 1)
    return objective.tpot_ms is not None and 1e3 * (now - first) > objective.tpot_ms * gaps


def loss_of(status: int, code: str | None, dropped: str | None) -> Outcome:
    """An HTTP error as one of the four losses. `dropped` is llm-d's header naming why."""
    if (dropped or code or "").startswith(_EVICTED):
        return Outcome.EVICTED
    if code != "backend_down" and (status in (429, 503) or (dropped or "").startswith("rejected")):
        return Outcome.REJECTED
    return Outcome.FAILED


def slo_targets(classes: Mapping[str, Mapping[str, float]]) -> dict[str, SloTargets]:
    return {name: SloTargets(**stated) for name, stated in classes.items()}


def _is_kept(took: Mapping[str, float | None], objective: SloTargets) -> bool:
    """An answer of one token has no gaps, so it keeps any TPOT; an embedding's TTFT is its end."""
    return all((value := took[name]) is None or value <= limit for name, limit in objective.stated().items())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def without_warmup(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if not record.planned.is_warmup]
