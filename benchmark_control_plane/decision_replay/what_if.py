"""What another configuration would have done with the requests of a log, and how sure that is.

The prediction is the measured attainment plus the difference of two replays of the same requests. Its error
combines the self-check's error, the spread of the difference over parts of the log (95 %), and what another
draw of the lengths that were never seen changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    groups_of,
    logged_results,
    replayed_results,
    summary_of,
)
from benchmark_control_plane.decision_replay.self_check import SelfCheck

_PARTS = 10
# Student's t of that many parts, 95 %.
_T95 = 2.262
_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class ClassChange:
    """What changes for the requests of one class and kind; shares, and counts of requests.

    `error` is that of `predicted`. `imputed` is the share of requests whose length is drawn from a forecast.
    `latency_change_ms` is the median over requests that both replays serve.
    """

    group: Group
    requests: int
    measured: float
    predicted: float
    error: float
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
    measured, before = logged_results(traffic.rows), check.replayed
    note("replaying the other configuration")
    after = replayed_results(traffic, sections)
    again, imputed = after, traffic.imputed
    if any(imputed):
        note("replaying it with other lengths of the requests that were not served")
        again = replayed_results(traffic, sections, seed=1)
    groups = groups_of(traffic, lambda row: True)
    classes = []
    for group, numbers in groups.items():
        was, old, new = (summary_of(results, numbers) for results in (measured, before, after))
        spread = _spread([_gain(before[n], after[n]) for n in numbers])
        drawn = summary_of(again, numbers).attainment - new.attainment
        both = [
            later - sooner
            for n in numbers
            if before[n].is_served and after[n].is_served
            and (later := after[n].latency_ms) is not None and (sooner := before[n].latency_ms) is not None
        ]  # fmt: skip
        classes.append(
            ClassChange(
                group,
                len(numbers),
                was.attainment,
                min(1.0, max(0.0, was.attainment + new.attainment - old.attainment)),
                sqrt(check.attainment_error(group) ** 2 + spread**2 + drawn**2),
                fmean(imputed[n] for n in numbers),
                sum(_gain(before[n], after[n]) > 0 for n in numbers),
                sum(_gain(before[n], after[n]) < 0 for n in numbers),
                sum(after[n].is_served and not before[n].is_served for n in numbers),
                sum(before[n].is_served and not after[n].is_served for n in numbers),
                median(both) if both else None,
            )
        )
    return WhatIf(classes, _examples(traffic, groups, before, after))


def _gain(before: RequestResult, after: RequestResult) -> int:
    return (after.outcome == "met") - (before.outcome == "met")


def _spread(gains: Sequence[int]) -> float:
    """Half of the 95 % interval of the mean, from the means of consecutive parts of the log."""
    size = len(gains) // _PARTS
    if not size:
        return 1.96 * stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 1.0
    means = [fmean(gains[part * size : (part + 1) * size]) for part in range(_PARTS)]
    return _T95 * stdev(means) / sqrt(_PARTS)


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
