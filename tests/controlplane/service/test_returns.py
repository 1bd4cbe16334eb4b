"""Those turned away together come back one after another, never before the drain."""

import asyncio
from itertools import pairwise

from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.memory import Footprint, MemoryLedger, Quota
from controlplane.core.request import Kind, Owner, Request, Timeline
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace
from controlplane.service.returns import Returns
from controlplane.service.ticket import Ticket
from predictors.step_time import ReportedPace

PACE = Pace(milliseconds(10), Duration(0))


def a_ticket() -> Ticket:
    chat = ServiceClass("chat", Slo(), priority=0, sheddable=True)
    request = Request("r", Kind.GENERATE, "llm", "t", chat, Slo(), Instant(0), 10, 100)
    footprint = Footprint(base=1_000, per_step=0, steps=100, worst=1_000)
    granted: asyncio.Future[None] = asyncio.new_event_loop().create_future()
    return Ticket(request, footprint, None, Timeline(Instant(0)), granted)


def some_returns(*, is_timed=True):
    pace = ReportedPace()
    pace.pace = PACE if is_timed else None
    return Returns(MemoryLedger({Owner.LLM: Quota(10_000), Owner.EMBEDDING: Quota(0)}), {Owner.LLM: pace})


def told(returns, drain, now=0):
    reject = Reject(Reason.SLO_UNATTAINABLE, drain)
    return returns.spaced(reject, a_ticket(), Instant(now)).retry_after


def test_a_burst_is_told_rising_times_after_the_drain():
    returns = some_returns()
    times = [told(returns, seconds(2)) for _ in range(4)]
    gaps = {b - a for a, b in pairwise(times)}
    assert times[0] >= seconds(2)
    # Each takes a tenth of the share for 100 steps of 10 ms.
    assert len(gaps) == 1 and gaps.pop() >= milliseconds(100)


def test_once_those_told_have_come_the_drain_alone_counts():
    returns = some_returns()
    first = told(returns, seconds(2))
    assert told(returns, seconds(2), now=seconds(3_600)) == first


def test_what_no_wait_cures_and_what_nobody_can_time_is_left():
    returns = some_returns()
    assert told(returns, None) is None
    assert told(some_returns(is_timed=False), seconds(2)) == seconds(2)
