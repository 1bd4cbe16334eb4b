"""The first tables of docs/results.md: where Tandem is behind, where it is ahead, what each mechanism earns.

All are computed from the committed results of `tandem bench run`; only the reasons in `REASONS` are written
here. A cell is one system at one load of one experiment.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table, not_measured
from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import ratio_text
from benchmark_control_plane.report.leads import Lead, condition, lead_over, lead_over_best, pairings
from benchmark_control_plane.report.schema import FrontierRow, Results, SystemInfo

REASONS: Mapping[str, str] = {}
"""Why Tandem is behind over all requests, by the name of an experiment of which that was examined."""

_NOT_EXAMINED, _TOO_FEW, _FEW = "not examined", "too few to tell a reason", 5
_SHOWN_POINTS = 0.5
"""A class, or a system without a mechanism, is listed from this difference on, in points."""

Source = Callable[[Path], str]
"""Link to a results file."""


@dataclass(frozen=True)
class BaselineComparison:
    """One system of kind tandem of an experiment, and its lead over the best baseline at each load."""

    file: Path
    label: str
    results: Results
    own: str
    others: Sequence[str]
    leads: Sequence[Lead]

    @property
    def name(self) -> str:
        """Name of the experiment, with the condition if there are several."""
        stated = condition(self.own)
        return f"{self.label}, {stated}" if stated else self.label

    @property
    def ablations(self) -> list[SystemInfo]:
        """The system without one mechanism each, under the same condition."""
        systems = self.results["systems"]
        has_conditions = sum(system["kind"] == "tandem" for system in systems) > 1
        return [
            system
            for system in systems
            if system["kind"] == "ablation"
            and (not has_conditions or condition(system["name"]) == condition(self.own))
        ]

    def class_leads(self, lead: Lead) -> Iterator[Lead]:
        """The lead of each class over the same baseline at the same load."""
        for name in aggregates.classes(self.results):
            found = lead_over(self.results, self.own, lead.other, lead.load, name)
            if found is not None:
                yield found


def comparisons(found: Iterable[tuple[Path, str, Results]]) -> list[BaselineComparison]:
    """Of all experiments, given as (file, name, results), whose baselines were all measured."""
    made = []
    for file, label, results in found:
        missing = not_measured(results)
        for own, others in pairings(results):
            runs = [run for run in results["runs"] if run["system"] == own]
            loads = aggregates.common_loads({**results, "runs": runs}) if runs else []
            leads = [lead for load in loads if (lead := lead_over_best(results, own, others, load))]
            if leads and not set(others) & set(missing):
                made.append(BaselineComparison(file, label, results, own, others, leads))
    return made


def lost_rows(compared: Sequence[BaselineComparison], source: Source) -> Iterator[list[str]]:
    """What Tandem is behind in over all requests: (where, points, against, reason, source)."""
    for each in compared:
        for lead in each.leads:
            if lead.is_lost:
                where = f"{each.name}, {formats.load(lead.load)} load"
                yield [where, _points(lead), lead.other, _reason(each, lead), source(each.file)]


def _reason(each: BaselineComparison, lead: Lead) -> str:
    runs = aggregates.runs_of(each.results, each.own, lead.load)
    offered = sum(run["offered_rps"] * run["duration_s"] for run in runs)
    requests = round(abs(lead.points) / 100 * offered)
    size = f"{requests} of {offered:,.0f} requests{', ahead on some seeds' if lead.changes_sign else ''}"
    unknown = _TOO_FEW if requests <= _FEW else _NOT_EXAMINED
    return f"{size}; {REASONS.get(each.file.stem, unknown)}"


def ahead_table(compared: Sequence[BaselineComparison], source: Source) -> list[str]:
    """A row for each comparison: its rate relative to the best baseline, and its lead at each load."""
    rows = (
        [
            each.name,
            _rates(each),
            points(each),
            source(each.file),
        ]
        for each in compared
    )
    relative = "req/s at 90 %, relative to the best baseline of each seed"
    head = ["experiment", relative, "points ahead at each load", "source"]
    return markdown_table(head, rows, has_texts=True)


def points(each: BaselineComparison) -> str:
    """Points ahead at each load."""
    return ", ".join(f"{formats.load(lead.load)}: {_signed(lead.points)}" for lead in each.leads)


def _rates(each: BaselineComparison) -> str:
    target = next(iter(aggregates.targets(each.results)), None)
    if target is None or (own := aggregates.frontier(each.results, each.own, target)) is None:
        return formats.ABSENT
    best = _virtual_best(each, target)
    if best is None:
        return "unknown: a baseline has no valid runs near it"
    if best["rps"] is not None:
        return ratio_text(each.results, own, best) or "the loads were too low to compare them"
    return "no baseline reaches it" if own["rps"] else "nobody reaches it"


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


def classes_table(compared: Sequence[BaselineComparison], source: Source) -> list[str]:
    """Classes behind the best baseline at a load, and what the other classes have of it there."""
    rows = []
    for each in compared:
        for name in aggregates.classes(each.results):
            behind = []
            for lead in each.leads:
                by_class = {found.requests: found for found in each.class_leads(lead)}
                if name in by_class and by_class[name].points <= -_SHOWN_POINTS:
                    behind.append((lead, by_class))
            if behind:
                by_load = ", ".join(
                    f"{formats.load(lead.load)}: {_signed(found[name].points)}" for lead, found in behind
                )
                rows.append([each.name, name, by_load, _gains(name, *behind[-1]), source(each.file)])
    head = ["experiment", "class", "points at each load", "the others at the last of these", "source"]
    return markdown_table(head, rows, has_texts=True)


def _gains(name: str, lead: Lead, by_class: Mapping[str, Lead]) -> str:
    others = (f"{other} {_signed(found.points)}" for other, found in by_class.items() if other != name)
    return ", ".join([*others, f"all {_signed(lead.points)}"])


def mechanisms_table(compared: Sequence[BaselineComparison], source: Source) -> list[str]:
    """What is lost without each mechanism at each load, in points; negative: it is better without."""
    rows = []
    for each in compared:
        for system in each.ablations:
            loads = [lead.load for lead in each.leads]
            found = (
                lead_over(each.results, each.own, system["name"], load, aggregates.OVERALL) for load in loads
            )
            leads = [lead for lead in found if lead is not None]
            by_load = ", ".join(f"{formats.load(lead.load)}: {_signed(lead.points)}" for lead in leads)
            what = f"{system['name']} ({system['description']})" if system["description"] else system["name"]
            rows.append([each.name, what, by_load, source(each.file)])
    head = ["experiment", "without a mechanism", "points lost at each load", "source"]
    return markdown_table(head, rows, has_texts=True)


def summary(compared: Sequence[BaselineComparison], live: Collection[str]) -> str:
    """In how many cells Tandem is ahead and behind, in the files `live` of real engines and simulated."""
    parts = []
    for words, chosen in (
        ("on real engines", [each for each in compared if each.file.name in live]),
        ("on the simulated device", [each for each in compared if each.file.name not in live]),
    ):
        cells = [lead for each in chosen for lead in each.leads]
        ahead = sum(round(lead.points, 1) > 0 for lead in cells)
        behind = sum(lead.is_lost for lead in cells)
        if cells:
            worst = f", by at most {-min(lead.points for lead in cells):.1f} points" if behind else ""
            parts.append(f"ahead in {ahead} of {len(cells)} cells {words} and behind in {behind}{worst}")
    return "; ".join(parts)


def live_rates(compared: Sequence[BaselineComparison], live: Collection[str]) -> str:
    """The rates at 90 % attainment relative to the best baseline of each seed, on real engines."""
    rates = (f"{each.name} {_rates(each)}" for each in compared if each.file.name in live)
    return "; ".join(rates)


def _points(lead: Lead) -> str:
    ends = f" ({_signed(min(lead.seeds))} to {_signed(max(lead.seeds))})" if len(lead.seeds) > 1 else ""
    return f"{_signed(lead.points)}{ends}"


def _signed(points: float) -> str:
    """With a tenth and a sign; no difference is +0.0."""
    return f"{round(points, 1) + 0.0:+.1f}"
