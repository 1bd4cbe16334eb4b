"""Fits to the first half of a log what its rows do not state of the machine.

Where passes and steps run at the same time, the server learns the times of steps without a pass only, and
by what each kind slows the other down is not logged. So the half is replayed. The ratio of logged to replayed
time of an answer is a line in the share of its time in which passes were under way: its value without passes
is the factor of all steps, and its rise that of steps during passes. The ratio of embeddings is the factor of
passes. The time from the end of a step to the gate is a line in the number of requests in the step: each of
their tokens is read, and an engine that plans a step ahead hands tokens over when the next step, which these
requests lengthen, has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

import numpy as np

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    logged_results,
    replayed_records,
    results_of,
)
from benchmark_control_plane.decision_replay.resistant_line import resistant_line
from benchmark_control_plane.simulator.simulation import SimulatedRecord
from controlplane.config import ConfigError
from controlplane.core.engine_reports import DeviceSharing
from controlplane.service.decision_log.log_rows import Row

# The replays end when the steps of the last one take as long as those of the log, within such a share.
_ROUNDS, _CLOSE = 4, 0.02
# A round changes times by at most this factor.
_MOST_FACTOR = 4.0
# Shorter answers say little of the time of a token, which is logged in steps of 0.1 ms.
_LEAST_TOKENS = 16


def with_host_delays(traffic: RecordedTraffic, *, most: int | None = None) -> RecordedTraffic:
    """The traffic with the machine and the time after a step that reproduce the first half of the log.

    Of that half only the first `most` requests are replayed; None replays all.

    Embeddings, and answers where passes and steps take turns, take the median by which the logged latency of
    the kind exceeds that of its replay; the replay has no detokenization, no transport between processes and
    no turn of an event loop. The time before the gate is in the log, for each request. Raises BadInput if
    this release refuses the configuration of the log.
    """
    try:
        return _fitted(traffic, most)
    except ConfigError as error:
        raise BadInput(f"this release refuses the configuration in the log: {error}") from error


def _fitted(traffic: RecordedTraffic, most: int | None) -> RecordedTraffic:
    first = replace(traffic, rows=traffic.first_half[:most])
    if first.machine.sharing is not DeviceSharing.TURNS:
        first = _with_measured_times(first)
    records = replayed_records(first, first.sections)
    excess = _excess(first.rows, records)
    delays = {
        kind: max(0.0, median(seconds for seconds, _ in found)) for kind, found in excess.items() if found
    }
    machine = first.machine
    if machine.sharing is not DeviceSharing.TURNS and excess.get("generate"):
        machine = replace(machine, delivery=_delivery(excess["generate"]))
        del delays["generate"]
    return replace(
        traffic, machine=machine, costs=first.costs, step_factor=first.step_factor, host_delays=delays
    )


def _with_measured_times(first: RecordedTraffic) -> RecordedTraffic:
    """The traffic on a machine on which answers and embeddings take as long as in the log."""
    pass_time = _PassTime(first.rows)
    for _ in range(_ROUNDS):
        records = replayed_records(first, first.sections)
        shares, ratios, pass_ratios = [], [], []
        for row, record in zip(first.rows, records, strict=True):
            logged, replayed = _computing_seconds(row), _replayed_seconds(row, record)
            if logged is None or replayed is None:
                continue
            if row["kind"] == "embed":
                pass_ratios.append(logged / replayed)
            else:
                shares.append(pass_time.share_before(_end(row), logged))
                ratios.append(logged / replayed)
        steps, rise = resistant_line(shares, ratios)
        step_slowdown = first.machine.step_slowdown * ((steps + rise) / steps if steps > 0 else 0.0)
        if step_slowdown < 1:
            steps, step_slowdown = median(ratios or [1.0]), 1.0
        passes = median(pass_ratios or [1.0])
        changes = steps, passes, step_slowdown / first.machine.step_slowdown
        if all(abs(change - 1) < _CLOSE for change in changes):
            break
        first = first.with_times(
            steps=_bounded(steps), passes=_bounded(passes), step_slowdown=min(_MOST_FACTOR, step_slowdown)
        )
    return first


def _bounded(factor: float) -> float:
    return min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor))


def _computing_seconds(row: Row) -> float | None:
    """The time from the first token to the last, or of the passes; None if it says little of their speed."""
    if row["outcome"] not in ("met", "late"):
        return None
    if row["kind"] == "embed":
        return _positive((row["e2e_ms"] - row.get("queue_ms", 0.0)) / 1e3)
    if row.get("ttft_ms") is None or row.get("output_tokens", 0) < _LEAST_TOKENS:
        return None
    if any(event.get("decision") == "PREEMPTED" for event in row["decisions"]):
        return None
    return _positive((row["e2e_ms"] - row["ttft_ms"]) / 1e3)


def _replayed_seconds(row: Row, record: SimulatedRecord) -> float | None:
    """The same time of the replay."""
    begin = record.dispatched if row["kind"] == "embed" else record.first_token
    if begin is None or record.finished is None or record.preemptions:
        return None
    return _positive((record.finished - begin) / 1e9)


def _positive(seconds: float) -> float | None:
    return seconds if seconds > 0 else None


def _end(row: Row) -> float:
    """When a request ended, in seconds."""
    return float(row["at"] / 1e6 + row["e2e_ms"] / 1e3)


class _PassTime:
    """The time in which embedding requests were being computed: from the dispatch of each to its end."""

    def __init__(self, rows: Sequence[Row]) -> None:
        spans = [
            (row["at"] / 1e6 + row.get("queue_ms", 0.0) / 1e3, _end(row))
            for row in rows
            if row["kind"] == "embed" and row["outcome"] in ("met", "late")
        ]
        changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        self._at = [0.0, *(at for at, _ in changes)]
        under_way = [0, *accumulate(change for _, change in changes)]
        # Seconds before each of these times.
        self._seconds = [
            0.0,
            *accumulate(
                (after - before) * (count > 0)
                for before, after, count in zip(self._at, self._at[1:], under_way, strict=False)
            ),
        ]

    def share_before(self, end: float, seconds: float) -> float:
        """The part of the `seconds` before `end` in which they were."""
        before, until = np.interp([end - seconds, end], self._at, self._seconds)
        return float(until - before) / seconds


def _excess(rows: Sequence[Row], records: Sequence[SimulatedRecord]) -> Mapping[str, list[tuple[float, int]]]:
    """Of each kind, by what seconds logged latencies exceed replayed ones, and the answers in progress."""
    begun = np.sort([each.first_token for each in records if each.first_token and each.finished])
    ended = np.sort([each.finished for each in records if each.first_token and each.finished])
    found: dict[str, list[tuple[float, int]]] = {}
    results = results_of(rows, records)
    for row, record, was, would in zip(rows, records, logged_results(rows), results, strict=True):
        if not (was.is_served and would.is_served) or was.latency_ms is None or would.latency_ms is None:
            continue
        at = record.first_token or 0
        running = np.searchsorted(begun, at, "right") - np.searchsorted(ended, at, "right")
        found.setdefault(row["kind"], []).append((1e-3 * (was.latency_ms - would.latency_ms), int(running)))
    return found


def _delivery(excess: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Seconds from the end of a step to the gate, and for each request in it."""
    seconds, running = zip(*excess, strict=True)
    constant, each = resistant_line(running, seconds)
    if constant < 0:
        constant, each = 0.0, median(one / max(1, n) for one, n in excess)
    if each < 0:
        constant, each = median(seconds), 0.0
    return max(0.0, constant), max(0.0, each)
