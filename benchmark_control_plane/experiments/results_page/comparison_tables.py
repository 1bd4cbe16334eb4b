"""The first tables of docs/results.md: where Tandem loses, where it wins, what each mechanism earns.

All are computed from the committed results of `tandem bench run`; only the reasons in `REASONS` are written
here. A cell is one load of one experiment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmark_control_plane.experiments.results_page.bench_tables import (
    loads_of_all_seeds,
    markdown_table,
    not_measured,
)
from benchmark_control_plane.experiments.results_page.other_losses import Loss
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import median_ratio, ratio_text
from benchmark_control_plane.report.leads import Lead, condition, lead_over, lead_over_best, pairings
from benchmark_control_plane.report.schema import FrontierRow, HindsightBound, Results, SystemInfo

REASONS: Mapping[tuple[str, float], str] = {
    (
        "predictors",
        0.75,
    ): "the device is busy all the time, and documents give "
    "way to chat, which has more weight and gains 2.3 points. With pessimistic lengths fewer answers run at "
    "once, and 2.8 points more are met at this load, but 3.5 fewer at 150 %",
    (
        "mix-memory",
        0.5,
    ): "behind on every seed; not understood. Measured again, the systems of a seed in turn and at 7.5 "
    "requests/s, it met 100.0 % and two of the baselines 99.5 and 99.6, which is not kept",
    (
        "workflow-engines",
        1.0,
    ): "each stage has an objective of its own, which the baseline does not know; of the "
    "workflows it kept 0.3 points more",
    (
        "matrix-sizes, batch 64",
        1.5,
    ): "one seed; documents give way to chat, which has more weight: 96 % of it "
    "met its SLO, of the baseline's 75",
    (
        "matrix-sizes, batch 128",
        1.5,
    ): "one seed; documents give way to chat, which has more weight: 97 % of it "
    "met its SLO, of the baseline's 84",
}
"""Why Tandem is behind over all requests, by the name of the comparison and the load, where it was examined.

The name is that of the experiment, or of several with the same runs, and the condition: `burstiness, CV 6`.
"""
_NOT_EXAMINED, _TOO_FEW, _FEW = "not examined", "too few to tell a reason", 5
_LARGE_POINTS = 1.0
"""A mechanism is listed from this difference on, and a loss beyond it is never too small for a reason."""
_SHOWN_POINTS = 0.5
"""A class, or a mechanism that costs, is listed from this difference on, in points."""


@dataclass(frozen=True)
class BaselineComparison:
    """One system of kind tandem of an experiment, and its lead over the best baseline at each load.

    Attributes:
        label: name of the experiment, or of several with the same runs, or of a cell of a matrix.
        anchor: where docs/results.md has the experiment.
        rules: the decision that the result precedes, or that it is of the present rules.
        is_live: whether it ran on real engines.
        own: name of the system of kind tandem.
        others: names of the baselines.
        loads: at which the system was measured on all seeds; at some a baseline may not have been.
    """

    label: str
    anchor: str
    rules: str
    is_live: bool
    results: Results
    own: str
    others: Sequence[str]
    loads: Sequence[float]
    leads: Sequence[Lead]

    @property
    def name(self) -> str:
        """Name of the experiment, with the condition if there are several."""
        stated = condition(self.own)
        return f"{self.label}, {stated}" if stated else self.label

    @property
    def link(self) -> str:
        """The name, linked to the section of the experiment."""
        return f"[{self.name}](#{self.anchor})"

    def incomplete(self, lead: Lead) -> str:
        """Of how many baselines, or seeds, the lead is, where it lacks a baseline or most of the seeds."""
        if self.has_few_seeds(lead):
            return f" ({len(lead.seeds)} of {self._seeds_at(lead.load)} seeds)"
        overall = aggregates.OVERALL
        found = (lead_over(self.results, self.own, other, lead.load, overall) for other in self.others)
        measured = sum(each is not None and not self.has_few_seeds(each) for each in found)
        return f" ({measured} of {len(self.others)} baselines)" if measured < len(self.others) else ""

    def has_few_seeds(self, lead: Lead) -> bool:
        """Whether the other system was measured on less than half of the seeds."""
        return 2 * len(lead.seeds) < self._seeds_at(lead.load)

    def _seeds_at(self, load: float) -> int:
        return len(aggregates.runs_of(self.results, self.own, load))

    def is_complete(self, lead: Lead) -> bool:
        """Whether the best baseline at this load is the best of all."""
        return not self.incomplete(lead)

    def variants(self, kind: str) -> list[SystemInfo]:
        """Systems of this kind under the same condition: `ablation` without a mechanism, or `what-if`."""
        systems = self.results["systems"]
        has_conditions = sum(system["kind"] == "tandem" for system in systems) > 1
        return [
            system
            for system in systems
            if system["kind"] == kind
            and (not has_conditions or condition(system["name"]) == condition(self.own))
        ]

    def points_over(self, system: SystemInfo) -> list[tuple[float, float]]:
        """Each load, and the lead over this system there in points, where most seeds have it."""
        found = (
            lead_over(self.results, self.own, system["name"], load, aggregates.OVERALL) for load in self.loads
        )
        return [
            (lead.load, lead.points) for lead in found if lead is not None and not self.has_few_seeds(lead)
        ]

    def class_leads(self, lead: Lead) -> Iterator[Lead]:
        """The lead of each class over the same baseline at the same load."""
        for name in aggregates.classes(self.results):
            found = lead_over(self.results, self.own, lead.other, lead.load, name)
            if found is not None:
                yield found


def comparisons(
    label: str, anchor: str, rules: str, results: Results, *, is_live: bool
) -> Iterator[BaselineComparison]:
    """Those of an experiment; none if a baseline of it was not measured at all."""
    missing = not_measured(results)
    for own, others in pairings(results):
        runs = [run for run in results["runs"] if run["system"] == own]
        common = aggregates.common_loads({**results, "runs": runs}) if runs else []
        leads = [lead for load in common if (lead := lead_over_best(results, own, others, load))]
        loads = loads_of_all_seeds(runs)
        if leads and not set(others) & set(missing):
            yield BaselineComparison(label, anchor, rules, is_live, results, own, others, loads, leads)


def losses(compared: Iterable[BaselineComparison]) -> Iterator[Loss]:
    """The cells that Tandem is behind in over all requests."""
    for each in compared:
        for lead in each.leads:
            if lead.is_lost:
                where = f"{formats.load(lead.load)} load"
                yield Loss(each.link, where, lead.points, _points(lead), lead.other, _reason(each, lead))
        target = next(iter(aggregates.targets(each.results)), 0.0)
        own, best = aggregates.frontier(each.results, each.own, target), _virtual_best(each, target)
        ratio = None if own is None or best is None else median_ratio(each.results, own, best)
        if ratio is not None and round(ratio, 2) < 1:
            where = f"req/s at {formats.share(target)} attainment"
            yield Loss(each.link, where, None, formats.times(ratio), "a virtual best baseline", _NOT_EXAMINED)


def _reason(each: BaselineComparison, lead: Lead) -> str:
    ours, theirs = (aggregates.runs_of(each.results, name, lead.load) for name in (each.own, lead.other))
    seeds = {run["seed"] for run in theirs}
    offered = sum(run["offered_rps"] * run["duration_s"] for run in ours if run["seed"] in seeds)
    requests = round(abs(lead.points) / 100 * offered)
    size = f"{requests} of {offered:,.0f} requests{', ahead on some seeds' if lead.changes_sign else ''}"
    is_small = requests <= _FEW and -lead.points <= _LARGE_POINTS
    by_class = [f"{of_class.requests} {_signed(of_class.points)}" for of_class in each.class_leads(lead)]
    unknown = _TOO_FEW if is_small else f"{_NOT_EXAMINED}; by class: {', '.join(by_class)}"
    return f"{size}; {REASONS.get((each.name, lead.load), unknown)}"


def ahead_table(compared: Iterable[BaselineComparison]) -> list[str]:
    """A row for each comparison with a load that is won: the relative rate, and the lead at each load."""
    won = (each for each in compared if _ahead(each.leads))
    rows = ([each.link, _rates(each), points(each), each.rules] for each in won)
    relative = "req/s at 90 % attainment, relative to a virtual best baseline"
    head = ["experiment", relative, "points ahead at each load", "rules"]
    return markdown_table(head, rows, has_texts=True)


def points(each: BaselineComparison) -> str:
    """Points ahead at each load, and of how many baselines where not all were measured."""

    def at(lead: Lead) -> str:
        return f"{formats.load(lead.load)}: {_signed(lead.points)}{each.incomplete(lead)}"

    return ", ".join(map(at, each.leads))


def _rates(each: BaselineComparison) -> str:
    target = next(iter(aggregates.targets(each.results)), None)
    if target is None or (own := aggregates.frontier(each.results, each.own, target)) is None:
        return formats.ABSENT
    best = _virtual_best(each, target)
    if best is None:
        return "unknown: a baseline has no valid runs near it"
    if best["rps"] is not None:
        return ratio_text(each.results, own, best) or "the loads were too low to compare them"
    least = formats.load(min(run["load"] for run in each.results["runs"]))
    return f"no {'baseline' if own['rps'] else 'system'} reaches it at {least} load or more"


def _virtual_best(each: BaselineComparison, target: float) -> FrontierRow | None:
    """The highest rate of any baseline on each seed that all have; None if the rate of one is not known."""
    rows = [aggregates.frontier(each.results, other, target) for other in each.others]
    known = [aggregates.rate_by_seed(row) for row in rows if row is not None]
    if len(known) < len(rows) or not (seeds := sorted(set.intersection(*map(set, known)))):
        return None
    rates = [max(by_seed[seed] for by_seed in known) or None for seed in seeds]
    return {
        "system": each.others[0], "target": target, "rps": aggregates.median_rate(rates),
        "per_seed": rates, "seeds": seeds,
    }  # fmt: skip


def classes_table(compared: Iterable[BaselineComparison]) -> list[str]:
    """Classes behind the best baseline, and all requests at the highest of these loads."""
    rows = []
    for each in compared:
        found: dict[str, list[str]] = {}
        last = None
        for lead in each.leads:
            for of_class in each.class_leads(lead):
                if of_class.points <= -_SHOWN_POINTS:
                    behind = f"{formats.load(lead.load)}: {_signed(of_class.points)}"
                    found.setdefault(of_class.requests, []).append(behind)
                    last = lead
        if last is not None:
            by_class = "; ".join(f"{name} {', '.join(behind)}" for name, behind in found.items())
            rows.append([each.link, by_class, f"{formats.load(last.load)}: {_signed(last.points)}"])
    head = ["experiment", "classes behind the best baseline, points at each load", "all requests"]
    return markdown_table(head, rows, has_texts=True)


def mechanisms_table(compared: Iterable[BaselineComparison]) -> list[str]:
    """What is lost without each mechanism at each load, in points; negative: it is better without.

    Mechanisms of less than a point at every load are named below the table.
    """
    rows, small = [], []
    for each in compared:
        for system in each.variants("ablation"):
            leads = each.points_over(system)
            if any(points >= _LARGE_POINTS or points <= -_SHOWN_POINTS for _, points in leads):
                rows.append([_described(system), _by_load(leads), each.link])
            elif leads:
                small.append(f"{system['name']} ({each.link})")
    head = ["without a mechanism", "points lost at each load", "experiment"]
    lines = markdown_table(head, rows, has_texts=True)
    return [*lines, f"Less than a point at every load: {', '.join(small)}.", ""] if small else lines


def what_if_table(compared: Iterable[BaselineComparison]) -> list[str]:
    """What is gained at each load, in points, by what Tandem lacks; then what hindsight leaves to gain.

    Only experiments with systems of kind `what-if`.
    """
    rows = []
    for each in compared:
        given = each.variants("what-if")
        for system in given:
            gains = [(load, -points) for load, points in each.points_over(system)]
            rows.append([_described(system), _by_load(gains), each.link])
        if given and aggregates.has_bounds(each.results):
            rows += [
                [words, _by_load(_left_by_hindsight(each, value)), each.link]
                for words, value in (
                    ("the best schedule with hindsight that was found", _feasible),
                    ("the bound that no schedule exceeds", _bound),
                )
            ]
    return markdown_table(["given", "points gained at each load", "experiment"], rows, has_texts=True)


def _feasible(bound: HindsightBound) -> float:
    return bound["feasible"]


def _bound(bound: HindsightBound) -> float:
    return bound["attainment"]


def _left_by_hindsight(
    each: BaselineComparison, value: Callable[[HindsightBound], float]
) -> list[tuple[float, float]]:
    """Each load, and by how many points the value of the bounds exceeds the attainment, mean of the seeds."""
    found = []
    for load in each.loads:
        runs = aggregates.runs_of(each.results, each.own, load)
        gaps = [
            value(bound) - (run["attainment"].get(aggregates.OVERALL) or 0.0)
            for run in runs
            if (bound := run.get("bound"))
        ]
        if gaps:
            found.append((load, 100 * fmean(gaps)))
    return found


def _described(system: SystemInfo) -> str:
    return f"{system['name']} ({system['description']})" if system["description"] else system["name"]


def _by_load(points: Iterable[tuple[float, float]]) -> str:
    return ", ".join(f"{formats.load(load)}: {_signed(value)}" for load, value in points)


def summary(compared: Sequence[BaselineComparison]) -> str:
    """In how many cells Tandem is ahead and behind, on real engines and simulated.

    Only cells with every baseline, on half of the seeds or more, count as such; the others are stated apart.
    """
    parts = []
    for words, is_live in (
        ("on real engines", True),
        ("on the simulated device, mostly against engines without a gate,", False),
    ):
        cells = [(each, lead) for each in compared if each.is_live is is_live for lead in each.leads]
        whole = [lead for each, lead in cells if each.is_complete(lead)]
        if not whole:
            continue
        behind = sum(lead.is_lost for lead in whole)
        worst = f", by at most {-min(lead.points for lead in whole):.1f} points" if behind else ""
        text = f"ahead in {_ahead(whole)} of {len(whole)} cells {words} and behind in {behind}{worst}"
        if rest := [lead for each, lead in cells if not each.is_complete(lead)]:
            text += (
                f" (of {len(rest)} more, which lack a baseline or most of the seeds, ahead in {_ahead(rest)})"
            )
        parts.append(text)
    return "; ".join(parts)


def _ahead(leads: Iterable[Lead]) -> int:
    return sum(round(lead.points, 1) > 0 for lead in leads)


def _points(lead: Lead) -> str:
    ends = f" ({_signed(min(lead.seeds))} to {_signed(max(lead.seeds))})" if len(lead.seeds) > 1 else ""
    return f"{_signed(lead.points)}{ends}"


def _signed(points: float) -> str:
    """With a tenth and a sign; no difference is +0.0."""
    return f"{round(points, 1) + 0.0:+.1f}"
