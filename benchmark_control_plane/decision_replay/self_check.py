"""Decides whether a replay reproduces its log well enough to be asked what-if questions.

The device's costs are those of the first half of the log; the requests of the second half are judged under
the log's own configuration. If a figure is off, the same replay on a device 5 % slower tells why: where that
alone moves a figure by more than its tolerance, the system was saturated, and its course cannot be predicted
from costs that are 5 % off; where it does not, the model of the device is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    Summary,
    groups_of,
    logged_results,
    replayed_results,
    summary_of,
)

_LEAST_SHARE, _LATENCY_SHARE = 0.03, 0.15
_SLOWER = 1.05
LEAST_JUDGED = 20
"""Requests below which a class is not judged."""


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """One figure of a class and kind, in the log and in the replay, in shares or milliseconds."""

    group: Group
    name: str
    measured: float
    replayed: float
    tolerance: float
    is_saturated: bool = False

    @property
    def is_reproduced(self) -> bool:
        """Whether the replay is within the tolerance."""
        return abs(self.replayed - self.measured) <= self.tolerance + 1e-9


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The figures of every judged class, the classes with too few requests, and the replay behind them."""

    figures: Sequence[CheckedFigure]
    not_judged: Sequence[Group]
    replayed: Sequence[RequestResult]

    @property
    def has_passed(self) -> bool:
        """Whether something was judged and all of it is reproduced."""
        return bool(self.figures) and all(figure.is_reproduced for figure in self.figures)

    def attainment_error(self, group: Group) -> float:
        """Difference of the attainment of a class; 0 for one that was not judged."""
        found = (each for each in self.figures if (each.group, each.name) == (group, "attainment"))
        return next((abs(each.replayed - each.measured) for each in found), 0.0)


def check_replay(traffic: RecordedTraffic) -> SelfCheck:
    """Replays the whole log and judges its second half."""
    middle, measured = traffic.middle, logged_results(traffic.rows)
    groups = groups_of(traffic, lambda row: row["at"] >= middle)
    judged = {group: numbers for group, numbers in groups.items() if len(numbers) >= LEAST_JUDGED}
    replayed = replayed_results(traffic, traffic.sections)
    figures = _figures(judged, measured, replayed)
    if any(not figure.is_reproduced for figure in figures):
        slower = replayed_results(traffic, traffic.sections, machine=traffic.slower(_SLOWER))
        on_slower = _figures(judged, measured, slower)
        figures = [
            CheckedFigure(
                each.group,
                each.name,
                each.measured,
                each.replayed,
                each.tolerance,
                is_saturated=any(
                    abs(other.replayed - same.replayed) > same.tolerance
                    for other, same in zip(on_slower, figures, strict=True)
                    if same.group == each.group
                ),
            )
            for each in figures
        ]
    return SelfCheck(figures, [group for group in groups if group not in judged], replayed)


def _figures(
    judged: dict[Group, list[int]], measured: Sequence[RequestResult], replayed: Sequence[RequestResult]
) -> list[CheckedFigure]:
    found = []
    for group, numbers in judged.items():
        was, would = summary_of(measured, numbers), summary_of(replayed, numbers)
        found += [
            CheckedFigure(
                group, "attainment", was.attainment, would.attainment, _share_tolerance(was.attainment, was)
            ),
            CheckedFigure(
                group, "rejected", was.rejected, would.rejected, _share_tolerance(was.rejected, was)
            ),
        ]
        for name, one, other in (("p50_ms", was.p50_ms, would.p50_ms), ("p90_ms", was.p90_ms, would.p90_ms)):
            if one is not None and other is not None and min(was.served, would.served) >= LEAST_JUDGED:
                found.append(CheckedFigure(group, name, one, other, _LATENCY_SHARE * one))
    return found


def _share_tolerance(share: float, of: Summary) -> float:
    """Three points, or the 95 % interval of a share of so many requests, whichever is wider."""
    return max(_LEAST_SHARE, 1.96 * sqrt(share * (1 - share) / of.requests))
