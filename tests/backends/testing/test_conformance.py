"""The conformance checks find policies that break the rules they name."""

from itertools import count

import pytest

from backends.testing.conformance import (
    check_admission,
    check_engine_policy,
    check_ordering,
    check_victims,
)
from controlplane.policy.engine.interface import StepPlan

DRAWN = count()


def offer_all(queue, view):
    preempt = list(view.running) if view.free < 0 else []
    return StepPlan(preempt, sorted(queue, key=lambda state: state.request.id))


class Broken:
    """First come, first served, without a look at memory."""

    def __init__(self, plan):
        self._queue = []
        self._plan = plan

    def enqueue(self, progress):
        self._queue.append(progress)

    def dequeue(self, progress):
        self._queue.remove(progress)

    def waiting(self):
        return len(self._queue)

    def plan(self, view):
        return self._plan(self._queue, view)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (offer_all, "are free|slots"),
        (lambda queue, view: StepPlan(offer=queue[:1] * 2), "offered twice"),
        (lambda queue, view: StepPlan(preempt=list(view.running)), "nothing starts"),
        (lambda queue, view: StepPlan(ranked=list(queue)), "does not run on"),
        (lambda queue, view: StepPlan(offer=view.running.at(range(len(view.running)))), "does not wait"),
        (lambda queue, view: StepPlan(), "quota is|idle engine"),
    ],
)
def test_broken_engine_policies_are_found(plan, message):
    with pytest.raises(AssertionError, match=message):
        check_engine_policy(lambda: Broken(plan))


def test_a_plan_that_depends_on_the_order_of_arrival_is_found():
    def first_that_fits(queue, view):
        fits = [one for one in queue if view.need(one) <= view.free and view.free_slots > 0]
        return StepPlan(offer=fits[:1])

    with pytest.raises(AssertionError, match="order of the input"):
        check_engine_policy(lambda: Broken(first_that_fits))


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (lambda request: (request.arrival, request.id), "not a tuple"),
        (lambda request: (request.arrival, 0, "x"), "does not end in the request id"),
        (lambda request: (request.arrival, hash(request.id), request.id), "more than the last key"),
    ],
)
def test_broken_orderings_are_found(rank, message):
    class Ordering:
        def __init__(self, options):
            pass

        def rank(self, request, footprint, pace):
            return rank(request)

    with pytest.raises(AssertionError, match=message):
        check_ordering(Ordering)


def test_broken_admissions_are_found():
    with pytest.raises(AssertionError, match="no longer fits"):
        check_admission(lambda share, look, footprint: len(share.leases) > 2)
    with pytest.raises(AssertionError, match="is no bool"):
        check_admission(lambda share, look, footprint: None)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(lambda running: None, "no number"), (lambda running: next(DRAWN), "changes between")],
)
def test_broken_victim_ranks_are_found(rank, message):
    with pytest.raises(AssertionError, match=message):
        check_victims(rank)
