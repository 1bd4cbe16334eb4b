"""Bounded rings of samples and events for the live feed, encoded as JSON when they are added.

Every record has a number from one sequence, so a reader asks for what is newer than the last number it has.
Each kind of record has a ring of its own: frequent admissions never displace a rare rejection or restart.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from heapq import merge
from itertools import islice
from operator import itemgetter

import orjson

from controlplane.core.clock import Clock, Duration, Instant, to_seconds

RING_SIZES: Mapping[str, int] = {
    "sample": 900,
    "admission": 300,
    "deferral": 200,
    "rejection": 250,
    "end": 450,
    "preemption": 300,
    "quota": 300,
    "restart": 60,
    "config": 60,
    "fault": 80,
}
"""Records that are kept, by kind: 900 samples, 15 minutes of one a second, and 2,000 events."""

MAX_ANSWER_BYTES = 65_536
# An answer holds at least one record of any size.
_MAX_RECORD_BYTES = 32_768
_number = itemgetter(0)


class LiveRecords:
    """The rings; memory is bounded by their sizes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.last = 0
        """Number of the newest record; the first one has 1."""
        self._rings: dict[str, deque[tuple[int, bytes]]] = {
            kind: deque(maxlen=size) for kind, size in RING_SIZES.items()
        }

    def add(self, kind: str, at: Instant, fields: Mapping[str, object]) -> None:
        """Adds a record of a kind in `RING_SIZES`; the fields of one above 32 KiB are left out."""
        self.last += 1
        head = {"seq": self.last, "at": _seconds(at), "type": kind}
        body = orjson.dumps({**head, **fields})
        if len(body) > _MAX_RECORD_BYTES:
            body = orjson.dumps({**head, "left_out_bytes": len(body)})
        # A copy: orjson's own result keeps its buffer of 4 KiB or more.
        self._rings[kind].append((self.last, bytes(memoryview(body))))

    def since(self, number: int, about: Mapping[str, object]) -> bytes:
        """The records after `number` as one JSON object of at most `MAX_ANSWER_BYTES`, oldest first.

        `next` is the number to ask with next; `more` is true if the size left newer records out. `about` are
        further members, which count towards the size.
        """
        rest = orjson.dumps({**about, "now": _seconds(self.clock.now())})[1:]
        room = (
            MAX_ANSWER_BYTES - len(rest) - len(b'{"next":,"more":false,"records":[],') - len(str(self.last))
        )
        found, last = [], min(number, self.last)
        newer = [islice(ring, bisect_right(ring, number, key=_number), None) for ring in self._rings.values()]
        for at, body in merge(*newer, key=_number):
            room -= len(body) + 1
            if room < 0:
                break
            found.append(body)
            last = at
        more = b"true" if room < 0 else b"false"
        return b'{"next":%d,"more":%s,"records":[%s],%s' % (last, more, b",".join(found), rest)


def _seconds(at: Instant) -> float:
    return round(to_seconds(Duration(at)), 3)
