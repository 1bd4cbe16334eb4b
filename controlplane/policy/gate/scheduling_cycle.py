"""Runs one scheduling cycle: applies the admission decision to all waiting requests in their order.

For each owner, with the waiting queue sorted by rank:

1. Reject what can never fit. For a serial owner (embeddings), also reject the late jobs among the queued
   calls and those in flight (`moore_hodgson`).
2. Admit from the head. Each request sees what the previous ones leave, until one does not fit. An engine that
   schedules by itself is filled until its queue is full or the next request would break a TPOT objective;
   requests that would be late in it are rejected.
3. Let the blocked head preempt if waiting would make it late, then continue.
4. Reject new requests beyond the maximum queue length.
5. Defer or reject the other new requests now, not when their time runs out.
6. Decide requests whose wait has ended, finally.

Within an owner no request overtakes a blocked head, so that small requests do not starve a large one. There
is one exception: a request that can no longer meet its TTFT goes behind those that can, until its wait ends.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from controlplane.core.clock import Instant
from controlplane.core.decision import Admit, Defer, Plan, Reason, Reject
from controlplane.core.pool_view import PoolView, Queue, Share, Waiting
from controlplane.policy.gate.admission import Admission, predicted_wait, retry_after
from controlplane.policy.gate.memory_lookahead import LookAhead

_by_rank = attrgetter("rank")


@dataclass(slots=True)
class _Decisions:
    """The decisions of the cycle so far, in the order decided."""

    dispatches: list[tuple[str, Admit]] = field(default_factory=list)
    deferrals: list[tuple[str, Defer]] = field(default_factory=list)
    rejections: list[tuple[str, Reject]] = field(default_factory=list)


class _BlockedQueue(NamedTuple):
    """What is left of a queue once its head is blocked."""

    blocked_by: Reason
    left: Sequence[Waiting]
    """The requests that were not decided, by rank."""
    late: Sequence[Waiting]
    """Those of them that went behind others because they are late in any case."""
    share: Share
    """The share after the admissions of this cycle, with its look-ahead."""
    look: LookAhead


def run_cycle(view: PoolView, now: Instant, admission: Admission) -> Plan:
    """Decides all queues of `view`; neither argument is changed."""
    decisions = _Decisions()
    for owner, queue in view.queues.items():
        if queue.waiting:
            _decide_owner(view.shares[owner], queue, now, admission, decisions)
            _explore(view.shares[owner], queue, admission, decisions)
    return Plan(tuple(decisions.dispatches), tuple(decisions.deferrals), tuple(decisions.rejections))


def _decide_owner(
    share: Share, queue: Queue, now: Instant, admission: Admission, decisions: _Decisions
) -> None:
    undecided = sorted(queue.undecided, key=_by_rank)
    candidates = queue.waiting
    unwanted = {
        w.request.id: reject
        for w in undecided
        if (reject := admission.reject_if_never_fits(share, w) or admission.reject_too_dear(share, w))
    }
    if unwanted:
        decisions.rejections += unwanted.items()
        candidates = [w for w in candidates if w.request.id not in unwanted]
    if share.is_serial and (late_jobs := admission.reject_late(share, candidates, now)):
        decisions.rejections += late_jobs.items()
        candidates = [w for w in candidates if w.request.id not in late_jobs]
        share = share.without([request.id for request, _ in share.calls if request.id in late_jobs])

    blocked = _admit_from_head(share, candidates, now, admission, decisions)
    if blocked is not None:
        _decide_blocked(blocked, undecided, now, admission, decisions)


def _decide_blocked(
    blocked: _BlockedQueue,
    undecided: Sequence[Waiting],
    now: Instant,
    admission: Admission,
    decisions: _Decisions,
) -> None:
    """Steps 4 to 6: defers or rejects the requests of `undecided` that are left in the queue."""
    blocked_by, left, late, share, look = blocked
    for waiting in undecided:
        request_id = waiting.request.id
        position = bisect_left(left, waiting.rank, key=_by_rank)
        if position == len(left) or left[position] is not waiting:
            continue
        late_before = [w for w in late if w.rank < waiting.rank]
        ahead = share.work(left[:position]) - share.work(late_before)
        if share.engine_work_ahead is not None:
            ahead += share.engine_work_ahead(waiting)
        is_new = waiting.until is not None and waiting.until > now
        if is_new and position >= admission.options.max_waiting:
            wait = predicted_wait(share, look, waiting, ahead=ahead)
            full = Reject(Reason.QUEUE_FULL, retry_after(wait), wait=wait)
            decisions.rejections.append((request_id, full))
            continue
        reason = Reason.BEHIND_OTHERS if position else blocked_by
        verdict = admission.wait_or_reject(share, look, waiting, ahead=ahead, why=reason, now=now)
        if isinstance(verdict, Defer):
            decisions.deferrals.append((request_id, verdict))
        else:
            decisions.rejections.append((request_id, verdict))


def _explore(share: Share, queue: Queue, admission: Admission, decisions: _Decisions) -> None:
    """Admits a few of the requests to be rejected (`Admission.try_explore`)."""
    if not admission.options.explore or not decisions.rejections:
        return
    entries = {waiting.request.id: waiting for waiting in queue.waiting}
    kept = []
    for request_id, reject in decisions.rejections:
        waiting = entries.get(request_id)
        admit = None if waiting is None else admission.try_explore(share, waiting, reject)
        if admit is None:
            kept.append((request_id, reject))
        else:
            decisions.dispatches.append((request_id, admit))
    decisions.rejections = kept


def _admit_from_head(
    share: Share, queue: Sequence[Waiting], now: Instant, admission: Admission, decisions: _Decisions
) -> _BlockedQueue | None:
    """Steps 2 and 3: admits from the head of `queue` until a request is blocked; None if none is."""
    look = LookAhead(share.leases)
    late: list[Waiting] = []
    decided: set[str] = set()
    for waiting in _late_last(queue, late, partial(admission.yields_to_timely, share, now=now)):
        verdict: Admit | Reason | Reject
        if share.engine_work_ahead is not None:
            verdict = admission.try_forward(share, look, waiting, now)
        elif (too_late := admission.reject_if_late_in_engine(share, waiting, now)) is not None:
            verdict = too_late
        else:
            verdict = admission.try_in_time(share, look, waiting, now)
        request_id = waiting.request.id
        if isinstance(verdict, Reject):
            decisions.rejections.append((request_id, verdict))
            decided.add(request_id)
            continue
        if not isinstance(verdict, Admit):
            is_by_tpot = verdict is Reason.TPOT_GUARD
            forced = None if is_by_tpot else admission.try_preempt(share, look, waiting, now)
            if forced is None:
                if decided:
                    queue, late = ([w for w in part if w.request.id not in decided] for part in (queue, late))
                return _BlockedQueue(verdict, queue, late, share, look)
            share = share.without([victim.request_id for victim in forced.victims])
            verdict = forced
        decisions.dispatches.append((request_id, verdict))
        decided.add(request_id)
        if len(decided) < len(queue):
            share = share.with_lease(waiting)
            look = LookAhead(share.leases)
    return None


def _late_last(
    queue: Iterable[Waiting], late: list[Waiting], yields: Callable[[Waiting], bool]
) -> Iterator[Waiting]:
    """Yields `queue` lazily with late requests moved to the end; `late` collects those passed so far."""
    for waiting in queue:
        if yields(waiting):
            late.append(waiting)
        else:
            yield waiting
    yield from late
