"""Blocks of a decision log: short pieces of its traffic that every configuration is tried on.

Every configuration gets the same blocks, so that the difference of two configurations is free of the
difference between blocks. The search uses blocks of the first half of the log, the verdict those of the
second.

A block begins where the server had the fewest requests, within some distance before those that are judged,
with these requests; and it ends with some that only keep the system busy. So it needs no more of the past
than the log needs to show it. Policies see requests that were waiting then as new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import Group
from controlplane.service.decision_log.log_rows import Row

RUNGS = (3, 9, 27)
"""Blocks after which a configuration is compared with the best."""
JUDGED = 200
"""Judged requests of a block, if the log is long enough."""
LEAST_JUDGED = 20
"""Judged requests of a block at least."""
# The warm-up lasts at least as long as nine in ten requests stay in the system, the tail as half of them do.
_WARM_UP_QUANTILE, _TAIL_QUANTILE = 0.9, 0.5
# Warm-up and tail have at most so many requests for each one that is judged.
_MOST_WARM_UP, _MOST_TAIL = 3, 1
_SEED = 7


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a log; the requests `first` to `last`, exclusive, of its traffic are judged."""

    traffic: RecordedTraffic
    first: int
    last: int

    @property
    def groups(self) -> dict[Group, list[int]]:
        """Positions of the judged requests by class and kind, without those aborted or failed in the log."""
        found: dict[Group, list[int]] = {}
        for number in range(self.first, self.last):
            row = self.traffic.rows[number]
            if row["outcome"] not in ("aborted", "failed"):
                found.setdefault((row["class"], row["kind"]), []).append(number - self.first)
        return found


def blocks_of(traffic: RecordedTraffic) -> tuple[list[Block], list[Block]]:
    """Blocks of the first half, for the search, and of the second, for the verdict; each in random order.

    Raises BadInput if the log is too short for as many blocks as the second rung has.
    """
    times = _Times.of(traffic.rows)
    middle = times.before(traffic.middle)
    halves = (0, middle), (middle, len(traffic.rows))
    size = min(JUDGED, min(end - start for start, end in halves) // RUNGS[1])
    if size < LEAST_JUDGED:
        needed = 2 * RUNGS[1] * LEAST_JUDGED
        raise BadInput(
            f"{len(traffic.rows):,} requests can be replayed; tuning needs at least {needed}, half of them "
            "in each half of the log's time; record more"
        )
    stays = [row["e2e_ms"] for row in traffic.rows if row.get("e2e_ms") is not None]
    warm_up, tail = np.quantile(stays, (_WARM_UP_QUANTILE, _TAIL_QUANTILE)) if stays else (0.0, 0.0)
    found = []
    for start, end in halves:
        count = min(RUNGS[-1], (end - start) // size)
        firsts = [start + round(at * (end - start - size) / max(1, count - 1)) for at in range(count)]
        Random(_SEED).shuffle(firsts)
        found.append(
            [_block(traffic, times, first, first + size, 1e3 * warm_up, 1e3 * tail) for first in firsts]
        )
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class _Times:
    """Microseconds at which each request arrives and ends, and the requests in the system as it arrives."""

    arrivals: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64]
    present: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Times":
        found = np.array([(row["at"], _end(row)) for row in rows])
        arrivals, ends = found[:, 0], found[:, 1]
        gone = np.searchsorted(np.sort(ends), arrivals, side="right")
        return cls(arrivals, ends, np.arange(len(rows)) - gone)

    def before(self, at: float) -> int:
        """Requests that arrive before `at`."""
        return int(np.searchsorted(self.arrivals, at))

    def until(self, at: float) -> int:
        """Requests that arrive at `at` or before."""
        return int(np.searchsorted(self.arrivals, at, side="right"))


def _block(
    traffic: RecordedTraffic, times: _Times, first: int, last: int, warm_up: float, tail: float
) -> Block:
    """The judged requests with those of `warm_up` microseconds or more before and `tail` after."""
    rows, size, present = traffic.rows, last - first, times.present
    earliest = max(0, first - _MOST_WARM_UP * size)
    latest = max(times.before(times.arrivals[first] - warm_up), earliest)
    start = latest - int(np.argmin(present[earliest : latest + 1][::-1]))
    end = min(times.until(times.arrivals[last - 1] + tail), last + _MOST_TAIL * size)
    begun = rows[start]["at"]
    resumed = [_resumed(rows[at], begun) for at in np.flatnonzero(times.ends[:start] > begun).tolist()]
    before = len(resumed) - start
    return Block(
        replace(traffic, rows=[*resumed, *rows[start:end]], left_out=()), first + before, last + before
    )


def _resumed(row: Row, begun: int) -> Row:
    """A request that is in the system when a block begins, with the part of its answer that is left."""
    ttft, end = row.get("ttft_ms"), _end(row)
    first = row["at"] + 1e3 * (ttft or 0.0)
    # It has reached the gate. A client that left does so at the same moment.
    row = {**row, "decisions": (), "at": begun, "e2e_ms": (end - begun) / 1e3}
    if ttft is None or not row.get("output_tokens") or first >= begun:
        return row
    left = (end - begun) / (end - first)
    found = {**row, "output_tokens": max(1, round(left * row["output_tokens"]))}
    if row.get("forecast") is not None:
        found["forecast"] = [round(left * tokens) for tokens in row["forecast"]]
    return found


def _end(row: Row) -> float:
    end: float = row["at"] + 1e3 * (row.get("e2e_ms") or 0.0)
    return end


def rungs_up_to(count: int) -> Sequence[int]:
    """The rungs for so many blocks; the last is all of them."""
    return [*(rung for rung in RUNGS if rung < count), count]
