"""What is the finding, in one sentence? Our rate against the best baseline's, or else the attainment."""

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.schema import FrontierRow, Results


def headline(results: Results) -> str:
    if not any(run["valid"] for run in results["runs"]):
        return "No valid run: this report shows nothing that may be quoted."
    return _by_rate(results) or _by_attainment(results)


def _by_rate(results: Results) -> str | None:
    system = aggregates.ours(results)
    target = next(iter(aggregates.targets(results)), None)
    if system is None or target is None:
        return None
    mine = aggregates.frontier(results, system["name"], target)
    best = aggregates.best_baseline(results, target)
    goal = f"{formats.share(target)} attainment"
    if mine is None or mine["rps"] is None:
        said = f"{system['name']} keeps {goal} at no rate that was offered"
        return f"{said}; {best['system']} does at {_rate(results, best)}." if best else f"{said}."
    said = f"At {goal}, {system['name']} serves {_rate(results, mine)}"
    if best is None or not best["rps"]:
        return (
            f"{said}; no baseline keeps it at any rate that was offered."
            if _has_baseline(results)
            else f"{said}."
        )
    beside = f"the best baseline ({best['system']}, {_rate(results, best)})"
    if aggregates.is_limit(results, best):
        return f"{said}, beside {beside}: the loads were too low to tell them apart."
    return f"{said}: {ratio_text(results, mine, best)} {beside}."


def _rate(results: Results, row: FrontierRow) -> str:
    return formats.reached(row["rps"], is_limit=aggregates.is_limit(results, row))


def ratio_text(results: Results, mine: FrontierRow, best: FrontierRow) -> str:
    """The ratio of the rates, with its range over the seeds where there are several."""
    ratios = seed_ratios(mine, best)
    least = "at least " if aggregates.is_limit(results, mine) else ""
    overall = least + formats.times((mine["rps"] or 0.0) / (best["rps"] or 1.0))
    if len(ratios) < 2:
        return overall
    low, high = formats.times(min(ratios)), formats.times(max(ratios))
    return f"{overall} ({'the same' if low == high else f'{low} to {high}'} over {len(ratios)} seeds)"


def seed_ratios(mine: FrontierRow, best: FrontierRow) -> list[float]:
    """Of the seeds on which theirs kept the target at some rate; where ours kept it at none, 0."""
    pairs = zip(mine["per_seed"], best["per_seed"], strict=False)
    return [(ours or 0.0) / theirs for ours, theirs in pairs if theirs]


def _by_attainment(results: Results) -> str:
    """What holds where no frontier was searched: the medians under the highest load with a valid run."""
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
    said = f"At {formats.load(load)} load, {ranked[0]} meets {best} of its objectives"
    if len(ranked) == 1:
        return f"{said}."
    return f"{said}; next comes {ranked[1]} with {formats.share(attained[ranked[1]])}."


def _has_baseline(results: Results) -> bool:
    return any(system["kind"] == "baseline" for system in results["systems"])


def cards(results: Results) -> list[tuple[str, str, str]]:
    """The figures of the headline with what belongs beside them: losses, and the spread of seeds."""
    system = aggregates.ours(results)
    if system is None or not aggregates.loads(results):
        return []
    return [*_rate_cards(results, system["name"]), *_load_cards(results, system["name"])]


def _rate_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    cards = []
    for goal in aggregates.targets(results):
        mine, best = aggregates.frontier(results, system, goal), aggregates.best_baseline(results, goal)
        if mine and mine["rps"]:
            beside = "no baseline reached it"
            if best and best["rps"]:
                beside = f"{ratio_text(results, mine, best)} {best['system']}"
            least = "\N{GREATER-THAN OR EQUAL TO} " if aggregates.is_limit(results, mine) else ""
            cards.append(
                (
                    f"rate at {formats.share(goal)} attainment",
                    least + formats.rate(mine["rps"]),
                    beside,
                )
            )
    return cards


def _load_cards(results: Results, system: str) -> list[tuple[str, str, str]]:
    """Under the highest load."""
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
