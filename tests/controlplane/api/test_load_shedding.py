"""Requests are rejected while all of them wait too long for the event loop, and not for a burst."""

from collections import Counter

from controlplane.api.load_shedding import INTERVAL, LoadShedder
from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.request import Kind

TARGET = milliseconds(50)
LATE, EARLY = milliseconds(80), milliseconds(1)


class Arrivals:
    """Requests every 10 ms."""

    def __init__(self) -> None:
        self.shed = 0
        self.now = Instant(10**12)
        self.shedder = LoadShedder(self._count)

    def _count(self, kind: Kind) -> None:
        self.shed += 1

    def come(self, count: int, delay: Duration) -> list[bool]:
        found = []
        for _ in range(count):
            found.append(self.shedder.sheds(Kind.EMBED, delay, self.now, TARGET))
            self.now = Instant(self.now + milliseconds(10))
        return found


def test_late_requests_are_shed_once_all_of_an_interval_were_late():
    arrivals = Arrivals()
    assert Counter(arrivals.come(10, LATE)) == {False: 10}
    assert Counter(arrivals.come(10, LATE)) == {True: 10}
    assert arrivals.shed == 10


def test_one_request_in_time_shows_that_the_queue_empties():
    arrivals = Arrivals()
    assert not any(arrivals.come(9, LATE) + arrivals.come(1, EARLY) + arrivals.come(10, LATE))
    assert arrivals.shed == 0


def test_a_request_in_time_is_served_during_overload():
    arrivals = Arrivals()
    arrivals.come(10, LATE)
    assert arrivals.come(2, LATE) + arrivals.come(1, EARLY) == [True, True, False]
    # The interval with that request ends the overload.
    arrivals.come(8, LATE)
    assert not any(arrivals.come(5, LATE))


def test_a_loop_that_is_late_by_more_than_an_interval_sheds():
    """The requests came while the loop was blocked, so nothing was idle in between."""
    arrivals = Arrivals()
    arrivals.come(2, LATE)
    arrivals.now = Instant(arrivals.now + 5 * INTERVAL)
    assert arrivals.come(2, Duration(5 * INTERVAL)) == [True, True]


def test_a_pause_at_low_load_sheds_nothing():
    """Requests a second apart that were each late, as by garbage collection, are no standing queue."""
    arrivals = Arrivals()
    for _ in range(5):
        assert arrivals.come(1, LATE) == [False]
        arrivals.now = Instant(arrivals.now + seconds(1))
