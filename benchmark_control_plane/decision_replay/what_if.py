"""What another configuration would have done with the requests of a log, and how sure that is.

The prediction is the measured attainment plus the difference of two replays of the same requests. Its error
has the parts of `prediction_error`. Where nearly all requests are in time under the log's configuration,
attainments do not show how wrong the model is where they are not. So both replays are repeated on a device
that is slower by as much as the self-check's latencies are off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmark_control_plane.decision_replay.prediction_error import ErrorParts, draw_error, sampling_error
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    gains_of,
    groups_of,
    logged_results,
    replayed_results,
    summary_of,
)
from benchmark_control_plane.decision_replay.self_check import SelfCheck

_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class ClassChange:
    """What changes for the requests of one class and kind; shares, and counts of requests.

    `error` is that of `predicted`, half of a 95 % interval whose ends within 0 and 1 are `low` and `high`;
    `error_parts` are its parts. `imputed` is the share of requests whose length is drawn from a forecast, and
    `latency_change_ms` the median over requests that both replays serve.
    """

    group: Group
    requests: int
    measured: float
    predicted: float
    error: float
    low: float
    high: float
    error_parts: ErrorParts
    imputed: float
    gained: int
    lost: int
    newly_served: int
    newly_rejected: int
    latency_change_ms: float | None


@dataclass(frozen=True, slots=True)
class ChangedRequest:
    """One request as both replays end it."""

    id: str
    group: Group
    before: RequestResult
    after: RequestResult


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The changes by class, and the requests that change most."""

    classes: Sequence[ClassChange]
    examples: Sequence[ChangedRequest]


def predict(
    traffic: RecordedTraffic, check: SelfCheck, sections: Mapping[str, Any], *, note: Callable[[str], None]
) -> WhatIf:
    """Replays the log under `sections`. Raises ConfigError if they do not fit the machine."""
    note("replaying the other configuration")
    after = replayed_results(traffic, sections)
    again, imputed = after, traffic.imputed
    if any(imputed):
        note("replaying it with other lengths of the requests that were not served")
        again = replayed_results(traffic, sections, seed=1)
    slower = 1 + check.time_error
    note(f"replaying both on a device that takes {slower:.2f} times as long")
    machine = traffic.slower(slower)
    replays = _Replays(
        logged_results(traffic.rows),
        check.replayed,
        after,
        again,
        replayed_results(traffic, traffic.sections, machine=machine),
        replayed_results(traffic, sections, machine=machine),
    )
    groups = groups_of(traffic, lambda row: True)
    classes = [
        _change(group, numbers, replays, check.attainment_error(group), fmean(imputed[n] for n in numbers))
        for group, numbers in groups.items()
    ]
    return WhatIf(classes, _examples(traffic, groups, replays.before, after))


@dataclass(frozen=True, slots=True)
class _Replays:
    """The requests in the log and as replays end them, each in the order of the log.

    `before` and `slow_before` are under the log's configuration, the others under the other one. `again` has
    other lengths, and the slow ones are on a slower device.
    """

    measured: Sequence[RequestResult]
    before: Sequence[RequestResult]
    after: Sequence[RequestResult]
    again: Sequence[RequestResult]
    slow_before: Sequence[RequestResult]
    slow_after: Sequence[RequestResult]


def _change(
    group: Group, numbers: Sequence[int], found: _Replays, self_check: float, imputed: float
) -> ClassChange:
    before, after = found.before, found.after
    gains = gains_of(before, after, numbers)
    measured = summary_of(found.measured, numbers).attainment
    predicted = min(1.0, max(0.0, measured + fmean(gains)))
    parts = ErrorParts(
        sampling=sampling_error(gains),
        self_check=self_check,
        device=abs(fmean(gains_of(found.slow_before, found.slow_after, numbers)) - fmean(gains)),
        lengths=draw_error(gains_of(after, found.again, numbers)),
    )
    both = [
        later - sooner
        for n in numbers
        if before[n].is_served and after[n].is_served
        and (later := after[n].latency_ms) is not None and (sooner := before[n].latency_ms) is not None
    ]  # fmt: skip
    return ClassChange(
        group,
        requests=len(numbers),
        measured=measured,
        predicted=predicted,
        error=parts.total,
        low=max(0.0, predicted - parts.total),
        high=min(1.0, predicted + parts.total),
        error_parts=parts,
        imputed=imputed,
        gained=gains.count(1),
        lost=gains.count(-1),
        newly_served=sum(after[n].is_served and not before[n].is_served for n in numbers),
        newly_rejected=sum(before[n].is_served and not after[n].is_served for n in numbers),
        latency_change_ms=median(both) if both else None,
    )


def _examples(
    traffic: RecordedTraffic,
    groups: Mapping[Group, Sequence[int]],
    before: Sequence[RequestResult],
    after: Sequence[RequestResult],
) -> list[ChangedRequest]:
    """The requests whose outcome changes, then those whose latency changes most, the earliest first."""

    def change(number: int) -> tuple[bool, float, int]:
        one, other = before[number], after[number]
        was, would = one.latency_ms, other.latency_ms
        shift = 0.0 if was is None or would is None else would - was
        return one.outcome == other.outcome, -abs(shift), number

    numbers = sorted((n for chosen in groups.values() for n in chosen), key=change)
    changed = [n for n in numbers if before[n] != after[n]][:_EXAMPLES]
    rows = traffic.rows
    return [
        ChangedRequest(rows[n]["id"], (rows[n]["class"], rows[n]["kind"]), before[n], after[n])
        for n in changed
    ]
