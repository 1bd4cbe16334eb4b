"""Decides whether one request is admitted, deferred or rejected, as a pure function.

Algorithm 1 of the collocation proposal, extended by growth and absolute times:

1. A request that can never fit is rejected at once, with the numbers.
2. A request that fits in addition to the predicted use of all leases is admitted. So is one that would be
   late by waiting for that, if its peak fits in addition to the bytes that the leases hold now: it risks a
   later preemption, but waiting would miss its SLO. In both cases the running requests must still meet their
   TPOT objectives (`tpot_guard`).
3. A request that would miss its deadline by waiting, and is not late yet, may preempt strictly lower
   priority, if that suffices.
4. A request that can still meet its deadline waits, up to a bound; one of a class that is not sheddable waits
   in any case.
5. All others are rejected with the predicted drain as Retry-After.

A request that would be late even in an empty queue is admitted where it need not wait: rejecting it gains
nothing, a retry would not help, and only its completion can show that the forecast was wrong. An embedding
call in that state is rejected while generation runs: it would be computed faster alone, and it would slow the
running requests down for nothing. So is a call that takes time in which generations would meet more SLOs,
weighted by class, than it is worth (`time_price`), and one in flight once its deadline is lost. If that
leaves no call, the smallest is admitted after a pause without passes, so that the times of passes are learned
anew.

An engine that schedules by itself manages its memory, and does step 3 itself. A request is forwarded to it
at once, while its queue has room and the running requests meet their TPOT. It is rejected only if it is
sheddable, would have to wait, and would be late even if its first token came as early, compared with the
estimate, as in the fastest tenth of recent requests that waited (`Share.wait_optimism`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from controlplane.core.clock import Duration, Instant, after, between, scaled, seconds
from controlplane.core.decision import Admit, Defer, Reason, Reject
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace, Share, Waiting
from controlplane.core.request import Request
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.gate.moore_hodgson import DeadlineJob, job_of, late_jobs, tokens_before
from controlplane.policy.gate.ordering import work_before_deadline
from controlplane.policy.gate.preemption import VictimRank, choose_victims, latest_started
from controlplane.policy.gate.time_price import PRICE_CHANGES_WITHIN, too_dear
from controlplane.policy.gate.tpot_guard import tpot_feasible

Fits = Callable[[Share, LookAhead, Footprint], bool]

_SHORTEST_RETRY = seconds(1)
LONGEST_RETRY = seconds(59)
"""Longest Retry-After of a rejection. OpenAI's clients ignore a longer one and retry within 8 s: the Python
client above 60 s, the Node client from 60 s on."""


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Limits and thresholds of admission.

    `max_waiting` bounds the queue length and `max_wait` the waiting time. A request that would have
    at most `defer_threshold` left is not deferred. With `tpot_guard` only as many requests run as their TPOT
    objectives allow. `explore` is the share of requests forwarded instead of rejected as unattainable.
    """

    max_waiting: int
    max_wait: Duration
    defer_threshold: Duration
    tpot_guard: bool = True
    explore: float = 0.0


@dataclass(frozen=True)
class Admission:
    """Steps 1 to 5 for one request.

    `fits` decides step 2. `victims` ranks the requests to preempt in step 3.
    """

    options: AdmissionOptions
    fits: Fits
    victims: VictimRank = latest_started

    def reject_if_never_fits(self, share: Share, waiting: Waiting) -> Reject | None:
        """Step 1: the rejection of a request larger than any single request may become, else None."""
        needed = max(waiting.footprint.base, waiting.footprint.worst)
        if needed <= share.largest:
            return None
        detail = (
            f"the request may need {needed:,} bytes of memory and a single request can be given at most "
            f"{share.largest:,}; shorten the input or lower max_tokens"
        )
        return Reject(Reason.NEVER_FITS, None, detail)

    def reject_too_dear(self, share: Share, waiting: Waiting) -> Reject | None:
        """The rejection of an embedding call that costs generations more SLOs than it meets, else None."""
        if not share.is_serial or (why := too_dear(share, waiting)) is None:
            return None
        return Reject(Reason.DEVICE_TIME, retry_after(PRICE_CHANGES_WITHIN), why)

    def reject_late(self, share: Share, queue: Sequence[Waiting], now: Instant) -> dict[str, Reject]:
        """Rejections by request id among the jobs of a serial owner that cannot all be on time.

        They may be of waiting calls or of calls in flight.
        """
        rejects: dict[str, Reject] = {}
        for model in dict.fromkeys(waiting.request.model for waiting in queue):
            if (pace := share.pace_of(model)) is None:
                continue
            # All calls that fit in one pass share its constant time.
            start, per_token = after(now, pace.step), float(pace.per_prompt_token)
            calls = [job_of(request, tokens) for request, tokens in share.calls if request.model == model]
            held_jobs = [job for job in calls if job is not None]
            # The embedder computes late calls after all others, so they delay no other call.
            jobs = [job for job in held_jobs if job.ends_in_time(start, per_token)]
            waiting_jobs = [
                job_of(waiting.request, waiting.work) for waiting in queue if waiting.request.model == model
            ]
            # On an idle device even a request that will be late is admitted.
            is_busy = bool(calls) or share.is_device_shared
            jobs += [
                job
                for job in waiting_jobs
                if job is not None and (is_busy or job.ends_in_time(start, per_token))
            ]
            late = late_jobs(jobs, start, per_token)
            if share.is_device_shared:
                # A pass for a call whose deadline is lost would only delay the generations. The pass under
                # way may hold it.
                last_start = now - pace.step
                jobs += (lost := [job for job in held_jobs if job.is_lost(last_start, per_token)])
                late |= {job.name for job in lost}
                if not calls:
                    late -= _explored(jobs, late, pace, share.last_passes.get(model), now)
            kept_tokens = sum(job.tokens for job in jobs if job.name not in late)
            wait = Duration(pace.step + scaled(pace.per_prompt_token, kept_tokens))
            # In order of deadlines: Retry-After is spaced in this order.
            late_in_order = [job.name for job in sorted(jobs) if job.name in late]
            reject = Reject(Reason.SLO_UNATTAINABLE, retry_after(wait), wait=wait)
            rejects |= dict.fromkeys(late_in_order, reject)
        return rejects

    def reject_if_late_in_engine(self, share: Share, waiting: Waiting, now: Instant) -> Reject | None:
        """The rejection of a request that is late because the engine first prefills what it holds, else None.

        Memory is not considered.
        """
        load = share.decode_load
        if load is None or not load.sequences:
            return None
        wait = load.backlog
        if not self._is_late_and_sheddable(wait, share, waiting, now):
            return None
        return Reject(Reason.SLO_UNATTAINABLE, retry_after(wait), wait=wait)

    def yields_to_timely(self, share: Share, waiting: Waiting, now: Instant) -> bool:
        """Whether a new request goes behind those that can be on time, because it is late in any case.

        Starting it now gains nothing, and at the head of the queue it would block the others. It is decided
        at `until` at the latest, like any other.
        """
        if waiting.until is None or share.is_serial:
            return False
        latest = latest_start(waiting.request, waiting.footprint, share.pace)
        return latest is not None and latest < now

    def try_admit(self, share: Share, look: LookAhead, waiting: Waiting) -> Admit | Reason:
        """Step 2 without time: the admission, or the reason against it."""
        if share.free_slots <= 0:
            return Reason.NO_SLOT
        if share.deficit > 0 or share.held + waiting.footprint.base > share.ceiling:
            return Reason.NO_MEMORY
        if len(share.leases) == 0:
            return Admit(waiting.footprint)
        if self._breaks_tpot(share, waiting):
            return Reason.TPOT_GUARD
        return Admit(waiting.footprint) if self.fits(share, look, waiting.footprint) else Reason.NO_MEMORY

    def _breaks_tpot(self, share: Share, waiting: Waiting) -> bool:
        """Whether admitting the request breaks more TPOT objectives than it meets (`tpot_guard`)."""
        request, load = waiting.request, share.decode_load if self.options.tpot_guard else None
        if load is None:
            return False
        has_to_begin = request.first_deadline is not None
        if has_to_begin and not request.service_class.sheddable:
            # A request that is served in any case only loses time by waiting, so neither its own TPOT nor
            # those of its class hold it back.
            load = load.to_classes_from(request.service_class.priority + 1)
            waiting = replace(waiting, request=replace(request, slo=replace(request.slo, tpot=None)))
        return not tpot_feasible(load, waiting)

    def try_in_time(self, share: Share, look: LookAhead, waiting: Waiting, now: Instant) -> Admit | Reason:
        """Step 2: `try_admit`, but a request late by waiting for predicted room takes the room free now."""
        verdict = self.try_admit(share, look, waiting)
        if verdict is not Reason.NO_MEMORY or share.deficit > 0 or not _can_be_in_time(waiting, now):
            return verdict
        if not fits_now(share, look, waiting.footprint):
            return verdict
        steps = look.steps_until_fits(waiting.footprint, share.ceiling)
        wait = None if steps is None or share.pace is None else scaled(share.pace.step, steps)
        return Admit(waiting.footprint) if self._is_late_after(wait, share, waiting, now) else verdict

    def try_forward(
        self, share: Share, look: LookAhead, waiting: Waiting, now: Instant
    ) -> Admit | Reason | Reject:
        """Admission into the queue of an engine that schedules by itself."""
        if share.free_slots <= 0 or share.engine_work_ahead is None:
            return Reason.NO_SLOT
        if share.engine_keeps is not None:
            look = LookAhead(share.engine_keeps(waiting))
        wait = predicted_wait(share, look, waiting, ahead=share.engine_work_ahead(waiting)) or Duration(0)
        load = share.decode_load
        backlog = load.backlog if load is not None and load.sequences else Duration(0)
        # `wait_optimism` scales the whole time to the first token; the work in it takes as long as predicted.
        work = work_before_deadline(waiting.request, waiting.footprint, share.pace)
        shortest = max(backlog, Duration(scaled(Duration(wait + work), share.wait_optimism) - work))
        if (wait or backlog) and self._is_late_and_sheddable(shortest, share, waiting, now):
            return Reject(Reason.SLO_UNATTAINABLE, retry_after(wait), wait=wait)
        if self._breaks_tpot(share, waiting):
            return Reason.TPOT_GUARD
        return Admit(waiting.footprint, wait=wait)

    def try_explore(self, share: Share, waiting: Waiting, reject: Reject) -> Admit | None:
        """The admission of a request to be rejected, drawn by a hash of its id; None for most.

        Only an engine that schedules by itself takes more than fits.
        """
        is_possible = reject.reason is Reason.SLO_UNATTAINABLE and share.engine_work_ahead is not None
        if not is_possible or crc32(waiting.request.id.encode()) >= self.options.explore * 2**32:
            return None
        return Admit(waiting.footprint, wait=reject.wait or Duration(0), is_explored=True)

    def try_preempt(self, share: Share, look: LookAhead, waiting: Waiting, now: Instant) -> Admit | None:
        """Step 3: an admission with victims, or None.

        Only for a request that waiting would make late, and only if the victims suffice. A request that is
        already late gains nothing from preempting lower classes.
        """
        priority = waiting.request.service_class.priority
        if not len(share.leases) or share.leases.priority.min() >= priority:
            return None
        if not _can_be_in_time(waiting, now):
            return None
        if not self._is_late_after(predicted_wait(share, look, waiting, ahead=0.0), share, waiting, now):
            return None
        # Only the bytes missing at present use: a preemption for predicted growth may prove unnecessary.
        short = share.held + waiting.footprint.peak - share.ceiling
        # Victims of an earlier request in this cycle hold no lease any more.
        leased = set(share.leases.ids)
        victims = choose_victims(
            [running for running in share.preemptible() if running.request_id in leased],
            needed_bytes=max(1, share.deficit + short),
            incoming_priority=priority,
            rank=self.victims,
        )
        if not victims:
            return None
        # At least one request leaves for the one that starts, so steps get no longer.
        freed = replace(share.without([victim.request_id for victim in victims]), decode_load=None)
        verdict = self.try_in_time(freed, LookAhead(freed.leases), waiting, now)
        return Admit(waiting.footprint, victims) if isinstance(verdict, Admit) else None

    def wait_or_reject(
        self, share: Share, look: LookAhead, waiting: Waiting, *, ahead: float, why: Reason, now: Instant
    ) -> Defer | Reject:
        """Steps 4 and 5, for a request that cannot start now.

        `ahead` is the work of the requests before it in the queue (unit as in `Waiting.work`). `why` is what
        keeps it from starting: the reason of a deferral.
        """
        wait = predicted_wait(share, look, waiting, ahead=ahead)
        until = waiting.until
        if until is None:
            return Defer(None, why, wait)
        if until <= now:
            return Reject(self._timeout_reason(waiting), retry_after(wait), wait=wait)
        if waiting.request.service_class.sheddable and self._is_late_after(wait, share, waiting, now):
            return Reject(Reason.SLO_UNATTAINABLE, retry_after(wait), wait=wait)
        return Defer(until, why, wait)

    def _is_late_after(self, wait: Duration | None, share: Share, waiting: Waiting, now: Instant) -> bool:
        """Whether the request has too little time left to be deferred, or less than `wait`."""
        pace = share.pace_of(waiting.request.model)
        latest = latest_start(waiting.request, waiting.footprint, pace)
        if latest is None:
            return False
        left = between(now, latest)
        return left <= self.options.defer_threshold or (wait is not None and wait > left)

    def _is_late_and_sheddable(self, wait: Duration, share: Share, waiting: Waiting, now: Instant) -> bool:
        """Whether the request may be rejected, and misses its first deadline if it waits for `wait`."""
        request = waiting.request
        deadline = request.first_deadline
        if deadline is None or waiting.until is None or not request.service_class.sheddable:
            return False
        work = work_before_deadline(request, waiting.footprint, share.pace)
        return after(now, Duration(wait + work)) > deadline

    def _timeout_reason(self, waiting: Waiting) -> Reason:
        """Whether the wait of a request has ended by `max_wait` or by its objective."""
        cap = after(waiting.request.arrival, self.options.max_wait)
        return Reason.QUEUE_TIMEOUT if waiting.until == cap else Reason.SLO_UNATTAINABLE


def _explored(
    jobs: Sequence[DeadlineJob], late: set[str], pace: Pace, last_pass: Instant | None, now: Instant
) -> set[str]:
    """The smallest job, if all are late and the pace is that of passes long ago; else none.

    Without it a time with long passes would reject all calls for good, since only a pass corrects the pace.
    """
    if not jobs or last_pass is None or any(job.name not in late for job in jobs):
        return set()
    smallest = min(jobs, key=lambda job: job.tokens)
    return {smallest.name} if pace.is_old(last_pass, now, smallest.tokens) else set()


def fits_ahead(share: Share, look: LookAhead, footprint: Footprint) -> bool:
    """Whether use stays below the ceiling at every predicted completion."""
    return look.peak_with(footprint) <= share.ceiling


def fits_now(share: Share, look: LookAhead, footprint: Footprint) -> bool:
    """The rule as published: present use plus the peak of the new request, without growth of the others."""
    return share.held + footprint.peak <= share.ceiling


def fits_always(share: Share, look: LookAhead, footprint: Footprint) -> bool:
    """Leaves the decision to present use: the caller has checked that the base fits."""
    return True


def _can_be_in_time(waiting: Waiting, now: Instant) -> bool:
    """Whether the request has a first deadline that has not passed."""
    deadline = waiting.request.first_deadline
    return deadline is not None and deadline >= now


def latest_start(request: Request, footprint: Footprint, pace: Pace | None) -> Instant | None:
    """The last instant at which a start still meets the first deadline; None without a deadline."""
    deadline = request.first_deadline
    if deadline is None:
        return None
    return Instant(deadline - work_before_deadline(request, footprint, pace))


def wait_bound(
    request: Request, footprint: Footprint, pace: Pace | None, options: AdmissionOptions
) -> Instant:
    """Latest time at which a waiting request is decided.

    The cap, or sooner if the request is sheddable and could no longer meet its deadline.
    """
    cap = after(request.arrival, options.max_wait)
    latest = latest_start(request, footprint, pace)
    if latest is None or not request.service_class.sheddable:
        return cap
    return min(cap, max(latest, request.arrival))


def predicted_wait(share: Share, look: LookAhead, waiting: Waiting, *, ahead: float) -> Duration | None:
    """Time until the request could start; None before the pace of the owner was observed.

    A serial owner frees memory as it works off what it holds, and then what is ahead; calls in flight with an
    earlier deadline are computed in any case. Any other owner frees memory and slots at its predicted
    completions, after which the queue ahead drains as a fluid through the whole share.
    """
    pace = share.pace
    if pace is None:
        return None
    held = len(share.leases)
    if share.is_serial:
        short = waiting.footprint.base - max(0, share.ceiling - share.held)
        part = min(1.0, max(0.0, short / max(1, share.held)))
        if share.free_slots <= 0 and held:
            part = max(part, 1 / held)
        done = part * share.tokens_left()
        before = tokens_before(share, waiting.request) * share.slowness(waiting.request.model)
        return scaled(pace.per_prompt_token, max(done, before) + ahead)
    memory = look.steps_until_free(waiting.footprint.base, share.ceiling)
    slot = float(look.steps[0]) if share.free_slots <= 0 and held else 0.0
    queue = ahead / max(1, share.ceiling)
    return scaled(pace.step, max(memory or 0.0, slot) + queue)


def retry_after(wait: Duration | None) -> Duration:
    """Returns `wait`, but at least one second, against retry storms, and at most `LONGEST_RETRY`.

    None counts as one second.
    """
    return max(_SHORTEST_RETRY, min(wait or _SHORTEST_RETRY, LONGEST_RETRY))
