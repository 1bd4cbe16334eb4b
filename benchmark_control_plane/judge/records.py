"""One record per request as seen by the client, judged by the objectives of its class.

Latencies count from the planned send time, not from the actual one, so a client that falls behind does not
hide delays (coordinated omission). A request that is never answered is a miss. Times are seconds from the
start of the measured window.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

_EVICTED = ("evicted", "preempted")
_FAILED = ("backend_down", "worker_died")
_CUT_OFF = "unfinished at the end of the drain"


@dataclass(slots=True)
class PartialResponse:
    """Response received so far; times are on the runner's clock, `loss` is set if the request was lost."""

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
    """Objectives of a class in milliseconds; None for none.

    Unlike `controlplane.core.slo.Slo` they are floating point, because they are multiples of measured
    latencies.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    gap_ms: float | None = None

    def objectives(self) -> dict[str, float]:
        """The objectives that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times, outcome and latencies of one request; `gap_ms` is the longest time between two tokens."""

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
    gap_ms: float | None
    e2e_ms: float | None
    status: int | None
    decision: str | None
    error: str | None

    @property
    def is_delivered(self) -> bool:
        """Whether the whole response came, in time or late; only then do its latencies count."""
        return self.e2e_ms is not None

    def to_json(self, run: int) -> dict[str, Any]:
        """Line of requests.jsonl; `run` is the index of the run in results.json."""
        planned = self.planned
        return {
            "run": run, "id": planned.id, "kind": str(planned.kind), "class": planned.service_class,
            "tenant": planned.tenant,
            "scheduled_s": _rounded(self.scheduled), "sent_s": _rounded(self.sent),
            "first_s": _rounded(self.first), "last_s": _rounded(self.last),
            "token_s": [_rounded(at) for at in self.tokens] or None,
            "prompt_tokens": planned.prompt_tokens, "output_tokens": self.output_tokens,
            "inputs": len(planned.lengths), "outcome": self.outcome.name,
            "ttft_ms": _rounded(self.ttft_ms), "tpot_ms": _rounded(self.tpot_ms),
            "max_tbt_ms": _rounded(self.gap_ms), "e2e_ms": _rounded(self.e2e_ms),
            "status": self.status, "decision": self.decision, "error": self.error,
            "warmup": planned.is_warmup,
        }  # fmt: skip


def judge_response(
    planned: PlannedRequest, scheduled: float, answer: PartialResponse, origin: float, objective: SloTargets
) -> RequestRecord:
    """Record of a finished request.

    `scheduled` and the times of `answer` are on the runner's clock, on which the window starts at `origin`.
    """
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
        "gap_ms": _longest_gap_ms(answer.tokens),
    }  # fmt: skip
    outcome = answer.loss or (Outcome.MET if _is_kept(took, objective) else Outcome.LATE)

    def relative(at: float | None) -> float | None:
        return None if at is None else at - origin

    return RequestRecord(
        planned=planned, scheduled=scheduled - origin, sent=relative(answer.sent), first=relative(first),
        last=relative(ended), tokens=[at - origin for at in answer.tokens],
        output_tokens=count if planned.kind is Kind.GENERATE else 0, outcome=outcome,
        ttft_ms=took["ttft_ms"] if planned.kind is Kind.GENERATE else None,
        tpot_ms=took["tpot_ms"], gap_ms=took["gap_ms"], e2e_ms=took["e2e_ms"],
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
    """Record of a request unfinished at `now`: LATE if it has missed an objective, otherwise ABORTED."""
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
    if objective.gap_ms is not None and (_longest_gap_ms([*answer.tokens, now]) or 0.0) > objective.gap_ms:
        return True
    gaps = max(1, planned.output_tokens - 1)
    return objective.tpot_ms is not None and 1e3 * (now - first) > objective.tpot_ms * gaps


def _longest_gap_ms(tokens: Sequence[float]) -> float | None:
    return max((1e3 * (after - before) for before, after in pairwise(tokens)), default=None)


def loss_of(status: int, code: str | None, dropped: str | None) -> Outcome:
    """Loss that an HTTP error stands for; `dropped` is llm-d's header with the reason."""
    if (dropped or code or "").startswith(_EVICTED):
        return Outcome.EVICTED
    if code not in _FAILED and (status in (429, 503) or (dropped or "").startswith("rejected")):
        return Outcome.REJECTED
    return Outcome.FAILED


def slo_targets(classes: Mapping[str, Mapping[str, float]]) -> dict[str, SloTargets]:
    """Objectives by class, from ttft_ms, tpot_ms, e2e_ms and gap_ms by class."""
    return {name: SloTargets(**stated) for name, stated in classes.items()}


def _is_kept(took: Mapping[str, float | None], objective: SloTargets) -> bool:
    """Whether all objectives are met; one token meets TPOT and gap, an embedding's TTFT is its completion."""
    return all(
        (value := took[name]) is None or value <= limit for name, limit in objective.objectives().items()
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def without_warmup(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Records of requests planned within the measured window."""
    return [record for record in records if not record.planned.is_warmup]
