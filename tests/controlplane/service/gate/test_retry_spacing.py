"""Those turned away together come back one after another, never before the drain."""

from itertools import pairwise

from controlplane.core.clock import Instant, milliseconds, seconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.request import Owner
from controlplane.service.gate.backpressure import RetrySpacer

WORK = milliseconds(100)


def told(returns, drain, now=0, work=WORK):
    reject = Reject(Reason.SLO_UNATTAINABLE, drain)
    return returns.space(reject, Owner.LLM, work, Instant(now)).retry_after


def test_a_burst_is_told_rising_times_after_the_drain():
    returns = RetrySpacer()
    times = [told(returns, seconds(2)) for _ in range(4)]
    gaps = {b - a for a, b in pairwise(times)}
    assert times[0] >= seconds(2)
    assert len(gaps) == 1 and gaps.pop() >= WORK


def test_once_those_told_have_come_the_drain_alone_counts():
    returns = RetrySpacer()
    first = told(returns, seconds(2))
    assert told(returns, seconds(2), now=seconds(3_600)) == first


def test_what_no_wait_cures_and_what_nobody_can_time_is_left():
    assert told(RetrySpacer(), None) is None
    assert told(RetrySpacer(), seconds(2), work=None) == seconds(2)
