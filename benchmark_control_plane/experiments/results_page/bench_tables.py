"""Markdown of the results of `tandem bench run`: the systems of one experiment side by side."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmark_control_plane.report import aggregates, formats
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.schema import Results, RunFigures

_MOST_PAUSE = 3.0
"""Longest pause between tokens of an undisturbed answer in TPOTs: 1.3 to 2.5 in the other results."""
_CHANGED = "working tree with changes that the commit lacks"
_IN_PARTS = "measured in parts: not all systems in turn, nor of one commit"
_WIDTH = 118


def full(results: Results, picture: str | None, link: str, judged: str = aggregates.OVERALL) -> str:
    """Headline, chart, and the systems: rates at the targets, attainment under each load, losses.

    With `judged` the attainment is that of this class, and there is neither a headline nor a rate.
    """
    ordered = aggregates.ordered(results)
    # Ablations may have been run under one load only.
    names = [system["name"] for system in ordered["systems"]][:1]
    own = [run for run in ordered["runs"] if run["system"] in names]
    loads = loads_of_all_seeds(own)
    first = [headline(ordered)] if judged == aggregates.OVERALL else []
    chart = [f"![Attainment against load]({picture})", ""] if picture else []
    table = _systems_table(ordered, loads, judged) if loads else []
    remarks = [*_attainable(ordered, loads), *_descriptions(ordered), *_speeds(ordered, loads)]
    remarks.append(_remarks(ordered, picture, link))
    return "\n".join((*first, "", *chart, *table, wrapped(" ".join(remarks)), ""))


def loads_of_all_seeds(runs: Sequence[RunFigures]) -> list[float]:
    """Without those that a search for a rate offered on some seeds only."""
    counted = Counter(load for load, _ in {(run["load"], run["seed"]) for run in runs})
    return sorted(load for load, count in counted.items() if count == max(counted.values()))


def wrapped(text: str) -> str:
    """The text, or item of a list, in lines of the page's width."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _systems_table(results: Results, loads: Sequence[float], judged: str) -> list[str]:
    goals = aggregates.targets(results) if judged == aggregates.OVERALL else []
    has_bounds = aggregates.has_bounds(results) and judged == aggregates.OVERALL
    classes = [name for name in aggregates.classes(results) if name != judged]
    head = [
        "system",
        *(f"req/s at {formats.share(goal)}" for goal in goals),
        *(f"{formats.load(load)} load" for load in loads),
        *(["of bound"] if has_bounds else []),
        *classes,
        "rejected",
        "evicted",
    ]
    rows = []
    for system in results["systems"]:
        name = system["name"]
        runs = aggregates.runs_of(results, name, loads[-1])
        last = [[run["attainment"].get(each) for run in runs] for each in classes]
        last += [[run["rates"]["reject"] for run in runs], [run["rates"]["evict"] for run in runs]]
        of_bound = [[aggregates.share_of_bound(run) for run in runs]] if has_bounds else []
        rows.append(
            [
                name,
                *(_rate_cell(results, name, goal) for goal in goals),
                *(_attained(results, name, load, judged) for load in loads),
                *map(_mean, (*of_bound, *last)),
            ]
        )
    return markdown_table(head, rows)


def _attained(results: Results, system: str, load: float, judged: str) -> str:
    """Mean and lowest over the seeds, and how many there are if the experiment has more."""
    runs = aggregates.runs_of(results, system, load)
    found = [run["attainment"].get(judged) or 0.0 for run in runs]
    if not found:
        return formats.ABSENT
    planned = len(aggregates.seeds(results))
    mean, lowest = _percent(fmean(found)), _percent(min(found))
    notes = [lowest] if lowest != mean else []
    if len(found) < planned:
        notes.append(formats.several(len(found), "seed"))
    return f"{mean} ({'; '.join(notes)})" if notes else mean


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _percent(fmean(known)) if known else formats.ABSENT


def _percent(share: float) -> str:
    return formats.share(share).removesuffix(" %")


def _attainable(results: Results, loads: Sequence[float]) -> list[str]:
    if not aggregates.has_bounds(results) or not loads:
        return []
    share, first = aggregates.attainable_share(results), results["systems"][0]["name"]
    found = []
    for load in loads:
        shares = [share(run) for run in aggregates.runs_of(results, first, load)]
        known = [value for value in shares if value is not None]
        if known:
            found.append(f"{formats.share(fmean(known))} at {formats.load(load)} load")
    return [f"Known to be attainable, of the bound on the first system's requests: {', '.join(found)}."]


def _descriptions(results: Results) -> list[str]:
    texts = [f"*{each['name']}*: {each['description']}" for each in results["systems"] if each["description"]]
    return [f"{'; '.join(texts)}."] if texts else []


def _speeds(results: Results, loads: Sequence[float]) -> list[str]:
    """How fast the machine was while each system was measured."""
    texts = []
    for load in loads:
        took = [
            [
                run["busy_work_ms"]
                for run in aggregates.runs_of(results, each["name"], load)
                if "busy_work_ms" in run
            ]
            for each in results["systems"]
        ]
        if any(took):
            cells = [f"{fmean(times):.1f}" if times else formats.ABSENT for times in took]
            texts.append(f"{', '.join(cells)} at {formats.load(load)} load")
    if not texts:
        return []
    return [f"Mean ms that the same piece of work took during the runs, by system: {'; '.join(texts)}."]


def _remarks(results: Results, picture: str | None, link: str) -> str:
    environment = results["environment"]
    machine = ", ".join(
        [environment["cpu"], f"{environment['cores']} cores", *filter(None, [environment.get("gpu")])]
    )
    seeds = formats.several(len(aggregates.seeds(results)), "seed")
    remarks = [seeds, machine if picture else "virtual time", link]
    if "changed since" in (commit := environment["commit"] or ""):
        remarks.append(_CHANGED)
    if "continued at" in commit:
        remarks.append(_IN_PARTS)
    if others := [run["other_cores"] for run in results["runs"] if "other_cores" in run]:
        remarks.append(f"other processes used {fmean(others):.2f} cores, at most {max(others):.2f} in a run")
    if took := [run["work_ms"] for run in results["runs"] if "work_ms" in run]:
        remarks.append(f"the same piece of work took {min(took):.0f} to {max(took):.0f} ms before the runs")
    remarks += _disturbed(results) if picture else []
    if invalid := aggregates.invalid(results):
        remarks.append(f"{len(invalid)} of {len(results['runs'])} runs not valid and left out")
        valid = {_cell_of(run) for run in results["runs"] if run["valid"]}
        if empty := sorted({cell for run in invalid if (cell := _cell_of(run)) not in valid}):
            cells = [f"{system} at {formats.load(load)}, seed {seed}" for system, load, seed in empty]
            remarks.append(f"without a valid run: {', '.join(cells)}")
    if results["partial"]:
        remarks.append("**partial: the experiment was interrupted**")
        if missing := not_measured(results):
            remarks.append(f"**not measured: {', '.join(missing)}**")
    return f"({'; '.join(remarks)}.)"


def _disturbed(results: Results) -> list[str]:
    """The classes whose unloaded latencies, and so objectives, other work on the machine lengthened."""
    classes = []
    for name, latencies in results.get("unloaded_ms", {}).items():
        pause, tpot = latencies.get("gap_ms"), latencies.get("tpot_ms")
        if pause is not None and tpot is not None and pause > _MOST_PAUSE * tpot:
            classes.append(f"{name} {tpot:.1f} ms, longest pause {pause:.0f} ms")
    if not classes:
        return []
    return [
        f"**other work lengthened the latencies that objectives are multiples of: TPOT {'; '.join(classes)}**"
    ]


def _cell_of(run: RunFigures) -> tuple[str, float, int]:
    return run["system"], run["load"], run["seed"]


def not_measured(results: Results) -> list[str]:
    """Systems of an interrupted experiment without a run."""
    measured = {run["system"] for run in results["runs"]}
    return [system["name"] for system in results["systems"] if system["name"] not in measured]


def _rate_cell(results: Results, system: str, goal: float) -> str:
    if (row := aggregates.frontier(results, system, goal)) is None:
        return formats.ABSENT
    ends, least = aggregates.rates(row), "at least " if aggregates.is_limit(results, row) else ""
    notes = []
    if ends and ends.low < ends.high:
        has_limit = aggregates.has_limit(results, row)
        notes.append(formats.reached_range(ends.low, ends.high, is_limit=has_limit))
    if aggregates.seeds_left_out(results, row):
        notes.append(formats.several(len(row["per_seed"]), "seed"))
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{least}{formats.figure(row['rps'])}{note}"


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, has_texts: bool = False
) -> list[str]:
    """A table whose columns after the first hold figures, or with `has_texts` texts."""
    return [_line(head), "|---|" + ("---|" if has_texts else "--:|") * (len(head) - 1), *map(_line, rows), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
