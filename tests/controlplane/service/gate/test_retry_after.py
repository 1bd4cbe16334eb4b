"""Requests rejected together get increasing Retry-After times, none before the drain."""

from itertools import pairwise

from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.decision import Reason, Reject
from controlplane.core.request import Owner
from controlplane.policy.gate.admission import LONGEST_RETRY
from controlplane.service.gate.retry_after import RetrySpacer

WORK = milliseconds(100)


def retry_after(spacer, drain, now=0, work=WORK):
    reject = Reject(Reason.SLO_UNATTAINABLE, drain)
    return spacer.space(reject, Owner.LLM, work, Instant(now)).retry_after


def test_a_burst_gets_increasing_times_after_the_drain():
    spacer = RetrySpacer()
    times = [retry_after(spacer, seconds(2)) for _ in range(4)]
    gaps = {b - a for a, b in pairwise(times)}
    assert times[0] >= seconds(2)
    assert len(gaps) == 1 and gaps.pop() >= WORK


def test_past_slots_do_not_delay_later_rejections():
    spacer = RetrySpacer()
    first = retry_after(spacer, seconds(2))
    assert retry_after(spacer, seconds(2), now=seconds(3_600)) == first


def test_rejections_without_retry_after_or_service_time_are_unchanged():
    assert retry_after(RetrySpacer(), None) is None
    assert retry_after(RetrySpacer(), seconds(2), work=None) == seconds(2)


def test_a_late_slot_does_not_delay_requests_with_a_shorter_drain():
    spacer = RetrySpacer()
    assert retry_after(spacer, seconds(50)) > seconds(50)
    assert retry_after(spacer, seconds(2)) < seconds(10)


def test_no_time_is_longer_than_clients_obey_and_those_beyond_take_no_slot():
    spacer = RetrySpacer()
    times = [retry_after(spacer, seconds(2), work=seconds(5)) for _ in range(6)]
    assert times == [seconds(4), seconds(19), seconds(34), seconds(49), LONGEST_RETRY, LONGEST_RETRY]
    # A minute later the slots are over, and none was taken beyond them.
    assert retry_after(spacer, seconds(2), now=seconds(64)) == seconds(4)
    assert retry_after(spacer, seconds(300)) == LONGEST_RETRY


def test_a_slot_that_is_too_short_is_left_out():
    spacer = RetrySpacer()
    first = retry_after(spacer, seconds(2), work=seconds(1))
    later = retry_after(spacer, Duration(seconds(2) + seconds(4)), work=seconds(1))
    # Between the two a gap of one second is free; the third needs three seconds.
    assert (first, later) == (seconds(4), seconds(8))
    assert retry_after(spacer, seconds(2), work=seconds(1)) == seconds(11)
    assert retry_after(spacer, seconds(2), work=milliseconds(300)) == seconds(7)
