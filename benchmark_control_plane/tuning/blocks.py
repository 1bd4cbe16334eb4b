"""Blocks of a decision log: short pieces of its traffic that every configuration is tried on.

Every configuration gets the same blocks, so that the difference of two configurations is free of the
difference between blocks. The search uses blocks of the first half of the log, the verdict those of the
second.

A block begins where the server had the fewest requests, within some distance before those that are judged,
with these requests; and it ends with some that only keep the system busy. So it needs no more of the past
than the log needs to show it. Policies see requests that were waiting then as new ones.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

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
    middle = bisect_left(traffic.rows, traffic.middle, key=_at)
    halves = (0, middle), (middle, len(traffic.rows))
    size = min(JUDGED, min(end - start for start, end in halves) // RUNGS[1])
    if size < LEAST_JUDGED:
        needed = 2 * RUNGS[1] * LEAST_JUDGED
        raise BadInput(
            f"{len(traffic.rows):,} requests can be replayed; tuning needs at least {needed}, half of them "
            "in each half of the log's time; record more"
        )
    stays = [row["e2e_ms"] for row in traffic.rows if row.get("e2e_ms") is not None]
    present = _present(traffic.rows)
    warm_up, tail = np.quantile(stays, (_WARM_UP_QUANTILE, _TAIL_QUANTILE)) if stays else (0.0, 0.0)
    found = []
    for start, end in halves:
        count = min(RUNGS[-1], (end - start) // size)
        firsts = [start + round(at * (end - start - size) / max(1, count - 1)) for at in range(count)]
        Random(_SEED).shuffle(firsts)
        found.append(
            [_block(traffic, present, first, first + size, 1e3 * warm_up, 1e3 * tail) for first in firsts]
        )
    return found[0], found[1]


def _present(rows: Sequence[Row]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The number of requests in the system when each request arrives."""
    ends = np.sort([_end(row) for row in rows])
    arrivals = np.array([_at(row) for row in rows])
    return np.arange(len(rows)) - np.searchsorted(ends, arrivals, side="right")


def _block(
    traffic: RecordedTraffic,
    present: "np.ndarray[Any, np.dtype[np.int64]]",
    first: int,
    last: int,
    warm_up: float,
    tail: float,
) -> Block:
    """The judged requests with those of `warm_up` microseconds or more before and `tail` after."""
    rows, size = traffic.rows, last - first
    earliest = max(0, first - _MOST_WARM_UP * size)
    latest = max(bisect_left(rows, rows[first]["at"] - warm_up, key=_at), earliest)
    start = latest - int(np.argmin(present[earliest : latest + 1][::-1]))
    end = min(bisect_right(rows, rows[last - 1]["at"] + tail, key=_at), last + _MOST_TAIL * size)
    begun = rows[start]["at"]
    resumed = [_resumed(row, begun) for row in rows[:start] if _end(row) > begun]
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


def _at(row: Row) -> int:
    at: int = row["at"]
    return at


def _end(row: Row) -> float:
    return _at(row) + 1e3 * (row.get("e2e_ms") or 0.0)


def rungs_up_to(count: int) -> Sequence[int]:
    """The rungs for so many blocks; the last is all of them."""
    return [*(rung for rung in RUNGS if rung < count), count]
