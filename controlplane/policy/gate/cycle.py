"""One round of decisions over everything that waits: (view, now) -> plan. Pure.

For each owner, with the queue sorted by rank:

1. reject what can never fit; of a serial owner's calls, let in or not, those that give way (`in_time`);
2. admit from the head, each on what the ones before it leave, until one does not fit (into an engine that
   holds back by itself: until its queue is full or one would break the pace, rejecting who would be late);
3. let that one preempt if waiting would make it late, and go on;
4. reject newcomers beyond the queue's length;
5. defer or reject the newcomers left: they are told at once, not when their time runs out;
6. decide those whose wait is up, finally.

Nobody overtakes the blocked head within an owner, so a large request is not starved by small ones. But those
for whom memory is reserved pass one that would have started had it not been; and an answer that can no longer
begin in time goes behind those that can, until its wait is up.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from controlplane.core.clock import Instant
from controlplane.core.decision import Admit, Defer, Plan, Reason, Reject
from controlplane.core.view import PoolView, Queue, Share, Waiting
from controlplane.policy.gate.admission import Admission, predicted_wait, retry_after
from controlplane.policy.gate.memory_lookahead import LookAhead


@dataclass(slots=True)
class _Draft:
    dispatches: list[tuple[str, Admit]] = field(default_factory=list)
    deferrals: list[tuple[str, Defer]] = field(default_factory=list)
    rejections: list[tuple[str, Reject]] = field(default_factory=list)


def run_cycle(view: PoolView, now: Instant, admission: Admission) -> Plan:
    draft = _Draft()
    for owner, queue in view.queues.items():
        if queue.waiting:
            _decide_owner(view.shares[owner], queue, now, admission, draft)
    return Plan(tuple(draft.dispatches), tuple(draft.deferrals), tuple(draft.rejections))


def _decide_owner(share: Share, queue: Queue, now: Instant, admission: Admission, draft: _Draft) -> None:
    undecided = sorted(queue.undecided, key=_by_rank)
    waiting = queue.waiting
    impossible = {w.request.id: reject for w in undecided if (reject := admission.never_fits(share, w))}
    if impossible:
        draft.rejections += impossible.items()
        waiting = [w for w in waiting if w.request.id not in impossible]
    if share.is_serial and (gone := admission.reject_late(share, waiting, now)):
        draft.rejections += gone.items()
        waiting = [w for w in waiting if w.request.id not in gone]
        share = share.without([request.id for request, _ in share.calls if request.id in gone])

    left, late, share, look, why = _admit_from_head(share, waiting, now, admission, draft)
    if why is None:
        return
    for one in undecided:
        request_id = one.request.id
        at = bisect_left(left, one.rank, key=_by_rank)
        if at == len(left) or left[at] is not one:
            continue
        ahead = share.work(left[:at]) - share.work([w for w in late if w.rank < one.rank])
        if share.inside is not None:
            ahead += share.inside(one)
        is_new = one.until is not None and one.until > now
        if is_new and at >= admission.options.max_waiting:
            wait = predicted_wait(share, look, one, ahead=ahead)
            draft.rejections.append((request_id, Reject(Reason.QUEUE_FULL, retry_after(wait))))
            continue
        reason = Reason.BEHIND_OTHERS if at else why
        verdict = admission.wait_or_reject(share, look, one, ahead=ahead, why=reason, now=now)
        if isinstance(verdict, Defer):
            draft.deferrals.append((request_id, verdict))
        else:
            draft.rejections.append((request_id, verdict))


def _by_rank(waiting: Waiting) -> tuple[int, int, str]:
    return waiting.rank


def _admit_from_head(
    share: Share, queue: Sequence[Waiting], now: Instant, admission: Admission, draft: _Draft
) -> tuple[list[Waiting], list[Waiting], Share, LookAhead, Reason | None]:
    """Who is left, who of them was seen to stand back, the share after those taken, and why the first of
    those left was not."""
    look = admission.lookahead(share)
    late: list[Waiting] = []
    taken: set[str] = set()
    why: Reason | None = None
    for waiting in _late_last(queue, late, partial(admission.yields_to_timely, share, now=now)):
        if why is not None and not share.is_kept_for(waiting.request):
            continue
        verdict: Admit | Reason | Reject
        if (too_late := admission.reject_if_late_in_engine(share, waiting, now)) is not None:
            verdict = too_late
        elif share.inside is None:
            verdict = admission.try_in_time(share, look, waiting, now)
        else:
            verdict = admission.try_forward(share, look, waiting, now)
        request_id = waiting.request.id
        if isinstance(verdict, Reject):
            draft.rejections.append((request_id, verdict))
            taken.add(request_id)
            continue
        if not isinstance(verdict, Admit):
            is_for_pace = verdict is Reason.NO_PACE
            forced = None if is_for_pace else admission.try_preempt(share, look, waiting, now)
            if forced is None:
                why = why or verdict
                if not admission.is_held_by_reserve(share, look, waiting):
                    break
                continue
            share = share.without([victim.request_id for victim in forced.victims])
            verdict = forced
        draft.dispatches.append((request_id, verdict))
        taken.add(request_id)
        if len(taken) < len(queue):
            share = share.with_lease(waiting)
            look = admission.lookahead(share)
    if not taken:
        return list(queue), late, share, look, why
    left, late = ([one for one in some if one.request.id not in taken] for some in (queue, late))
    return left, late, share, look, why


def _late_last(
    queue: Iterable[Waiting], late: list[Waiting], stands_back: Callable[[Waiting], bool]
) -> Iterator[Waiting]:
    """Looks no further than it is asked to; `late` are those passed so far."""
    for waiting in queue:
        if stands_back(waiting):
            late.append(waiting)
        else:
            yield waiting
    yield from late
