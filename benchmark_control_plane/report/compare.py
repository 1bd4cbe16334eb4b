"""Compares two results of the same experiment over runs paired by system, load and seed.

Paired runs share their arrivals and objectives if both experiments have the same capacity and objectives;
what differs is stated. Latencies and goodput: geometric mean of the paired ratios B/A, with a 95
% t interval in logarithms. Shares: mean of the paired differences B - A, with a t interval. B is worse if
attainment or goodput fell and the interval excludes "no change"; other figures are shown without a verdict.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.schema import METRICS, Results, RunFigures

CONFIDENCE = 0.95
_PERCENTILES = ("p50", "p99")

Place = tuple[str, float]
"""System, load."""


@dataclass(frozen=True)
class Change:
    """Change of one metric: a ratio B/A or a difference of shares; no interval with fewer than two pairs."""

    place: Place
    metric: str
    before: float
    after: float
    value: float
    interval: tuple[float, float] | None
    pairs: int
    is_ratio: bool
    is_judged: bool

    def is_worse(self) -> bool:
        """Whether a judged metric fell and its interval excludes no change."""
        no_change = 1.0 if self.is_ratio else 0.0
        return self.is_judged and self.interval is not None and self.interval[1] < no_change

    def is_clear(self) -> bool:
        """Whether the interval excludes no change, in either direction."""
        no_change = 1.0 if self.is_ratio else 0.0
        return self.interval is not None and not self.interval[0] <= no_change <= self.interval[1]


@dataclass(frozen=True)
class ResultsComparison:
    """All changes from A to B; `partial` names the sides of interrupted experiments.

    `differences` are those of the load and the objectives, besides which a change may have other causes.
    """

    changes: tuple[Change, ...]
    unpaired: int
    partial: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def worse(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_worse())

    def facts(self) -> dict[str, Any]:
        """The changes as plain values, for JSON."""
        rows = [asdict(change) | {"is_worse": change.is_worse()} for change in self.changes]
        return {
            "changes": rows, "unpaired": self.unpaired, "partial": list(self.partial),
            "differences": list(self.differences),
        }  # fmt: skip

    def text(self) -> str:
        """The changes as an aligned text table, with remarks."""
        head = ("system", "load", "metric", "A", "B", "change", "95 % interval", "pairs", "")
        rows = [head, *map(_row, self.changes)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"{side} is partial: its experiment was interrupted" for side in self.partial]
        lines += [f"not the same: {difference}" for difference in self.differences]
        if self.unpaired:
            lines.append(
                f"{self.unpaired} valid runs have no counterpart in the other results and are left out"
            )
        lines.append(
            f"{len(self.worse)} of {sum(c.is_judged for c in self.changes)} judged figures got worse"
        )
        return "\n".join(lines)


def compare_results(a: Results, b: Results) -> ResultsComparison:
    """Compares A with B. Raises BadInput if no valid run of A has a counterpart in B."""
    before, after = _by_key(a), _by_key(b)
    shared = [key for key in before if key in after]
    if not shared:
        raise BadInput(
            "A and B share no valid run of the same system, load and seed; "
            "compare two results of the same experiment"
        )
    pairs: dict[Place, list[tuple[RunFigures, RunFigures]]] = defaultdict(list)
    for key in sorted(shared):
        pairs[key[:2]].append((before[key], after[key]))
    names = [name for name in aggregates.classes(a) if name in aggregates.classes(b)]
    changes = [
        change
        for place, run_pairs in pairs.items()
        for metric, value, is_ratio, is_judged in _metrics(names)
        if (change := _change(place, metric, value, run_pairs, is_ratio=is_ratio, is_judged=is_judged))
    ]
    unpaired = len(before) + len(after) - 2 * len(shared)
    partial = tuple(side for side, results in (("A", a), ("B", b)) if results["partial"])
    return ResultsComparison(tuple(changes), unpaired, partial, tuple(_differences(a, b)))


def _differences(a: Results, b: Results) -> Iterator[str]:
    """What differs in load or objectives by more than the rounding of committed results."""
    stated: list[dict[str, float | None]] = []
    for results in (a, b):
        stated.append({"100 % load": results.get("capacity_rps")})
        for name, limits in results["slos"].items():
            stated[-1] |= {f"{name}.{metric}": limit for metric, limit in limits.items()}
    for name in dict.fromkeys([*stated[0], *stated[1]]):
        before, after = (side.get(name) for side in stated)
        if (before is None) != (after is None) or not math.isclose(before or 0, after or 0, rel_tol=1e-6):
            unit = "requests per second" if name == "100 % load" else "ms"
            yield f"{name} is {formats.figure(before)} {unit} in A and {formats.figure(after)} in B"


def _by_key(results: Results) -> dict[tuple[str, float, int], RunFigures]:
    return {(run["system"], run["load"], run["seed"]): run for run in results["runs"] if run["valid"]}


def _metrics(
    classes: Sequence[str],
) -> Iterator[tuple[str, Callable[[RunFigures], float | None], bool, bool]]:
    """Yields (name, value, whether it is compared as a ratio, whether it is judged)."""
    for name in (aggregates.OVERALL, *classes):
        yield f"attainment.{name}", _attained(name), False, True
    # A run that met nothing counts as if it had met one request, because its ratio would have no logarithm.
    yield "goodput_rps", lambda run: max(run["goodput_rps"], 1 / run["duration_s"]), True, True
    yield "rates.reject", lambda run: run["rates"]["reject"], False, False
    yield "rates.evict", lambda run: run["rates"]["evict"], False, False
    for name in classes:
        for metric in METRICS:
            for rank in _PERCENTILES:
                yield f"{name}.{metric}.{rank}", _percentile(name, metric, rank), True, False


def _attained(name: str) -> Callable[[RunFigures], float | None]:
    return lambda run: run["attainment"].get(name)


def _percentile(name: str, metric: str, rank: str) -> Callable[[RunFigures], float | None]:
    def value(run: RunFigures) -> float | None:
        figure = run["percentiles"].get(name, {}).get(metric, {}).get(rank)
        return figure[0] if figure else None

    return value


def _change(
    place: Place,
    metric: str,
    value: Callable[[RunFigures], float | None],
    run_pairs: Sequence[tuple[RunFigures, RunFigures]],
    *,
    is_ratio: bool,
    is_judged: bool,
) -> Change | None:
    measured = [
        (a, b) for a, b in ((value(a), value(b)) for a, b in run_pairs) if a is not None and b is not None
    ]
    if is_ratio:
        measured = [(a, b) for a, b in measured if a > 0 and b > 0]
    if not measured:
        return None
    changes = [math.log(b / a) if is_ratio else b - a for a, b in measured]
    middle, interval = statistics.fmean(changes), t_interval(changes)
    before, after = (statistics.median(side) for side in zip(*measured, strict=True))
    if is_ratio:
        middle = math.exp(middle)
        interval = (math.exp(interval[0]), math.exp(interval[1])) if interval else None
    return Change(place, metric, before, after, middle, interval, len(measured), is_ratio, is_judged)


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = (
        float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def _row(change: Change) -> tuple[str, ...]:
    write = formats.times if change.is_ratio else _points
    level = formats.figure if change.is_ratio else formats.share
    interval = (
        f"{write(change.interval[0])} … {write(change.interval[1])}" if change.interval else "none (one pair)"
    )
    remark = "WORSE" if change.is_worse() else "differs" if change.is_clear() else ""
    return (
        change.place[0],
        formats.load(change.place[1]),
        change.metric,
        level(change.before),
        level(change.after),
        write(change.value),
        interval,
        f"{change.pairs}",
        remark,
    )


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f} pp"
