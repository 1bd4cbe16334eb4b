"""Writes the finding of an experiment in one sentence, and the key figures shown below it."""

from collections.abc import Sequence

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.leads import comparable
from benchmark_control_plane.report.schema import FrontierRow, Results


def headline(results: Results) -> str:
    """Our rate relative to the best baseline, or the attainment if no rate was searched."""
    if not any(run["valid"] for run in results["runs"]):
        return "No valid run: this report has no figure that may be quoted."
    return _by_rate(results) or _by_attainment(results)


def _by_rate(results: Results) -> str | None:
    """The rates at the highest target; at the next one that a system reaches, if none reaches that."""
    system = aggregates.tandem_system(results)
    if system is None:
        return None
    targets = aggregates.targets(results)
    reached = {row["target"] for row in results["max_goodput_rate"] if row["rps"] is not None}
    target = next((each for each in targets if each in reached), None)
    if target is None or target == targets[0]:
        return _at_target(results, system["name"], targets[0]) if targets else None
    finding = _at_target(results, system["name"], target)
    return finding and f"No system reaches {_goal(targets[0])} at any offered rate. {finding}"


def _goal(target: float) -> str:
    return f"{formats.share(target)} attainment"


def _at_target(results: Results, name: str, target: float) -> str | None:
    own = aggregates.frontier(results, name, target)
    if own is None:
        return None
    names = comparable(results, name)
    best = aggregates.best_baseline(results, target, names)
    goal = _goal(target)
    if own["rps"] is None:
        finding = f"{name} reaches {goal} at no offered rate"
        return f"{finding}; {best['system']} does at {_rate(results, best)}." if best else f"{finding}."
    finding = f"At {goal}, {name} serves {_rate(results, own)}"
    if best is None or not best["rps"]:
        return f"{finding}{_baselines_without_rate(results, target, names)}."
    baseline = f"the best baseline ({best['system']}, {_rate(results, best)})"
    if (ratio := ratio_text(results, own, best)) is not None:
        return f"{finding}: {ratio} {baseline}{_unknown_rates(results, target, names)}."
    if aggregates.has_limit(results, best):
        which = "" if aggregates.is_limit(results, best) else " on every seed"
        return f"{finding}; {baseline} was not saturated{which}: the loads were too low to compare them."
    return f"{finding}; {baseline} has too few valid runs on the same seeds to compare them."


def _rate(results: Results, row: FrontierRow) -> str:
    return formats.reached(row["rps"], is_limit=aggregates.is_limit(results, row))


def median_ratio(results: Results, own: FrontierRow, best: FrontierRow) -> float | None:
    """The ratio of the median rates over the seeds of both.

    None without a seed of both on which the baseline reached the target, or if its rate on a seed is a lower
    bound, which would make a ratio an upper bound.
    """
    if aggregates.has_limit(results, best) or not (pairs := aggregates.paired_rates(own, best)):
        return None
    ours, baseline = (aggregates.median_rate(rates) for rates in zip(*pairs, strict=True))
    return (ours or 0.0) / baseline if baseline else None


def ratio_text(results: Results, own: FrontierRow, best: FrontierRow) -> str | None:
    """`median_ratio`, with the range over the seeds if there are several."""
    if (ratio := median_ratio(results, own, best)) is None:
        return None
    ratios = [ours / baseline for ours, baseline in aggregates.paired_rates(own, best) if baseline]
    least = "at least " if aggregates.is_limit(results, own) else ""
    overall = least + formats.times(ratio)
    if len(ratios) < 2:
        return overall
    low, high = formats.times(min(ratios)), formats.times(max(ratios))
    least = "at least " if aggregates.has_limit(results, own) else ""
    ends = "the same" if low == high else f"{low} to {least}{high}"
    return f"{overall} ({ends} over {len(ratios)} seeds)"


def _by_attainment(results: Results) -> str:
    """The medians of all systems under the highest load with a valid run."""
    load = max(run["load"] for run in results["runs"] if run["valid"])
    attained: dict[str, float] = {}
    for system in results["systems"]:
        runs = aggregates.runs_of(results, system["name"], load)
        if over := aggregates.attained(runs, aggregates.OVERALL):
            attained[system["name"]] = over.median
    if not attained:
        return "No attainment was measured."
    ranked = sorted(attained, key=lambda name: (-attained[name], name))
    best = formats.share(attained[ranked[0]])
    finding = f"At {formats.load(load)} load, {ranked[0]} meets the SLO of {best} of its requests"
    if len(ranked) == 1:
        return f"{finding}."
    return f"{finding}; second is {ranked[1]} with {formats.share(attained[ranked[1]])}."


def _baselines_without_rate(results: Results, target: float, names: Sequence[str]) -> str:
    """Says how often the baselines reach the target whose median rate is none; nothing without baselines."""
    if unknown := _unknown_rates(results, target, names):
        return unknown
    if not names:
        return ""
    rows = [aggregates.frontier(results, name, target) for name in names]
    if any(rate for row in rows if row for rate in row["per_seed"]):
        return "; no baseline reaches it in most seeds"
    return "; no baseline reaches it at any offered rate"


def _unknown_rates(results: Results, target: float, names: Sequence[str]) -> str:
    """Names the baselines without a valid run near their rate at the target; empty if there are none."""
    unknown = [name for name in names if aggregates.frontier(results, name, target) is None]
    return f"; the rate of {', '.join(unknown)} is not known" if unknown else ""


def cards(results: Results) -> list[tuple[str, str, str]]:
    """Key figures as (name, value, note): rates, attainment with its spread, and losses."""
    system = aggregates.tandem_system(results)
    if system is None or not aggregates.loads(results):
        return []
    return [*_rate_cards(results, system["name"]), *_load_cards(results, system["name"])]


def _rate_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    cards = []
    for goal in aggregates.targets(results):
        own = aggregates.frontier(results, system, goal)
        best = aggregates.best_baseline(results, goal, comparable(results, system))
        if own and own["rps"]:
            note = "no baseline reached it"
            if best and best["rps"]:
                ratio = ratio_text(results, own, best)
                note = f"{ratio or 'not compared with'} {best['system']}"
            least = "\N{GREATER-THAN OR EQUAL TO} " if aggregates.is_limit(results, own) else ""
            cards.append(
                (
                    f"rate at {formats.share(goal)} attainment",
                    least + formats.rate(own["rps"]),
                    note,
                )
            )
    return cards


def _load_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    """Key figures under the highest load."""
    load = aggregates.loads(results)[-1]
    runs = aggregates.runs_of(results, system, load)
    under = f"at {formats.load(load)} load"
    cards = []
    for name in (aggregates.OVERALL, *aggregates.classes(results)[:1]):
        if over := aggregates.attained(runs, name):
            ends = f"over {formats.several(over.count, 'seed')}"
            if over.low < over.high:
                ends = f"{formats.share(over.low)} to {formats.share(over.high)} {ends}"
            cards.append((f"{name} met {under}", formats.share(over.median), ends))
    reject = aggregates.over_seeds(runs, lambda run: run["rates"]["reject"])
    evict = aggregates.over_seeds(runs, lambda run: run["rates"]["evict"])
    if reject and evict:
        evicted = f"evicted {formats.share(evict.median)}"
        cards.append((f"rejected {under}", formats.share(reject.median), evicted))
    return cards
