"""Decides whether a replay reproduces its log well enough to be asked what-if questions.

The device's costs are those of the first half of the log; the requests of the second half are judged under
the log's own configuration. If a figure is off, the same replay on a device 5 % slower shows why: where that
alone moves a figure by more than its tolerance, the system was saturated, and its course cannot be predicted
from costs that are 5 % off; where it does not, the model of the device is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, sqrt
from statistics import fmean

from benchmark_control_plane.decision_replay.prediction_error import Z95, paired_error
from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.replayed_requests import (
    Group,
    RequestResult,
    Summary,
    gains_of,
    groups_of,
    logged_results,
    replayed_results,
    summary_of,
)

_LEAST_SHARE, _LATENCY_SHARE = 0.03, 0.15
SLOWER = 1.05
"""Times of the slower device, as a multiple."""
LEAST_JUDGED = 20
"""Requests below which a class is not judged; a quantile is judged if so many requests are above it."""


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
    """The figures of every judged class, the classes with too few requests, and the replay behind them.

    `errors` are those of the attainment of each class, judged or not, as shares.
    """

    figures: Sequence[CheckedFigure]
    not_judged: Sequence[Group]
    replayed: Sequence[RequestResult]
    errors: Mapping[Group, float] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Whether something was judged and all of it is reproduced."""
        return bool(self.figures) and all(figure.is_reproduced for figure in self.figures)

    def attainment_error(self, group: Group) -> float:
        """How far the replayed attainment of a class may be off; 1 without requests of the class."""
        return self.errors.get(group, 1.0)

    @property
    def time_error(self) -> float:
        """The largest relative difference of a judged latency, at least that of the slower device."""
        times = (each for each in self.figures if each.name.endswith("_ms") and each.measured > 0)
        return max([SLOWER - 1, *(abs(each.replayed / each.measured - 1) for each in times)])


def check_replay(traffic: RecordedTraffic) -> SelfCheck:
    """Replays the whole log and judges its second half."""
    middle = traffic.middle
    return checked(
        groups_of(traffic, lambda row: row["at"] >= middle),
        logged_results(traffic.rows),
        replayed_results(traffic, traffic.sections),
        lambda: replayed_results(traffic, traffic.sections, machine=traffic.slower(SLOWER)),
    )


def checked(
    groups: Mapping[Group, Sequence[int]],
    measured: Sequence[RequestResult],
    replayed: Sequence[RequestResult],
    on_slower: Callable[[], Sequence[RequestResult]],
) -> SelfCheck:
    """Judges a replay.

    Args:
        groups: positions of the judged requests by class and kind.
        measured: what the log says of each request.
        replayed: what the replay says.
        on_slower: what a replay on a device slower by `SLOWER` says; called only if a figure is off.
    """
    judged = {group: numbers for group, numbers in groups.items() if len(numbers) >= LEAST_JUDGED}
    figures = _figures(judged, measured, replayed)
    if any(not figure.is_reproduced for figure in figures):
        slower = {(each.group, each.name): each for each in _figures(judged, measured, on_slower())}
        figures = [
            replace(
                each,
                is_saturated=any(
                    abs(other.replayed - same.replayed) > same.tolerance
                    for same in figures
                    if same.group == each.group
                    # A quantile that is judged on one device may have too few requests on the other.
                    and (other := slower.get((same.group, same.name))) is not None
                ),
            )
            for each in figures
        ]
    errors = {group: _attainment_error(measured, replayed, numbers) for group, numbers in groups.items()}
    return SelfCheck(figures, [group for group in groups if group not in judged], replayed, errors)


def _attainment_error(
    measured: Sequence[RequestResult], replayed: Sequence[RequestResult], numbers: Sequence[int]
) -> float:
    """The difference of the two attainments, and what so many requests cannot tell of it."""
    gains = gains_of(measured, replayed, numbers)
    return hypot(fmean(gains), paired_error(gains))


def _figures(
    judged: Mapping[Group, Sequence[int]],
    measured: Sequence[RequestResult],
    replayed: Sequence[RequestResult],
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
        fewest = min(was.served, would.served)
        for name, level, one, other in (
            ("p50_ms", 0.5, was.p50_ms, would.p50_ms),
            ("p90_ms", 0.9, was.p90_ms, would.p90_ms),
        ):
            if one is not None and other is not None and (1 - level) * fewest >= LEAST_JUDGED - 1e-9:
                found.append(CheckedFigure(group, name, one, other, _LATENCY_SHARE * one))
    return found


def _share_tolerance(share: float, of: Summary) -> float:
    """Three points, or the 95 % interval of a share of so many requests, whichever is wider."""
    return max(_LEAST_SHARE, Z95 * sqrt(share * (1 - share) / of.requests))
