"""The first part of docs/results.md: what was measured, what is lost and won, what each mechanism earns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from benchmark_control_plane.common.command_line import read_object
from benchmark_control_plane.experiments.results_page import (
    comparison_tables,
    component_page,
    other_losses,
    proposal_table,
    result_age,
)
from benchmark_control_plane.experiments.results_page.bench_tables import wrapped
from benchmark_control_plane.experiments.results_page.kept_results import Measured
from benchmark_control_plane.report.schema import Results

COMPONENTS = "component-results.md"
FROM_PAGE = "../benchmark_control_plane/results"
_TERMS = """A request meets its SLO if it meets every objective of its class; a rejected, evicted or failed
request is a miss. Attainment is the share of the requests that met theirs. A cell is one load of one
experiment, a point is one percent of its requests, and the best baseline is the best one at that load.
"""
_GIVEN = """Points that the default arrangement gains if it is given what it lacks, and by how many points a
schedule with hindsight is ahead of it. What neither explains is lost to the order of requests, or to a bound
that no schedule reaches.
"""
_SIMULATED = "The baselines are mostly the same engines without a gate."
_READING = """## How to read the tables

Shares are in percent, means over the seeds; in parentheses is the lowest seed where it is another figure.
After the loads follow, at the highest of them, the share of the bound in hindsight where that is known, the
attainment of each class, and the rejected and the evicted requests.

100 % load is the saturation throughput of the experiment's reference system. The rate at an attainment is
interpolated between the measured loads; it is the median over the seeds with the range in parentheses, and a
dash means that no offered load reached it, or that no seed has valid runs on both sides of it. In a range
"none" is a seed of which no offered load reached it, and "at least" one of which every load did; a seed
without them is left out. The virtual best baseline is, on each seed, the best of all.

Every figure is read from the linked JSON file. [benchmarking.md](benchmarking.md) describes the method,
[the table of commands](../benchmark_control_plane/README.md) states how to repeat each measurement.
"""


def front(
    folder: Path,
    found: Sequence[Measured],
    cells: Mapping[Path, Mapping[str, Results]],
    compared: Sequence[comparison_tables.BaselineComparison],
    live: Sequence[str],
    decisions: Path,
) -> str:
    """All sections before those of single experiments.

    Args:
        folder: where the results are kept.
        found: experiments of `tandem bench run`.
        cells: results by cell of each matrix.
        compared: their comparisons with baselines.
        live: file names of the experiments on real engines.
        decisions: folder of the decisions.
    """
    summary = comparison_tables.summary(compared)
    state = wrapped(f"Against the best baseline, Tandem is {summary}.") if summary else ""
    sections = (
        ("What was measured", [_TERMS, *_measured(folder, found, cells, live)]),
        ("Where Tandem loses", [state, "", *_lost(folder, compared)]),
        ("Classes that give way", comparison_tables.classes_table(compared)),
        ("Where Tandem wins", comparison_tables.ahead_table(compared)),
        ("What each mechanism earns", comparison_tables.mechanisms_table(compared)),
        ("Where the rest is lost", [_GIVEN, *comparison_tables.what_if_table(compared)]),
        ("Results of present and of older rules", [_ages(folder, decisions)]),
        ("The experiments of the proposal", proposal_table.table(folder, _links(folder, found, cells))),
    )
    parts = ["\n".join((f"## {heading}", "", *lines)) for heading, lines in sections]
    return "\n".join((*parts, _READING))


def _measured(
    folder: Path,
    found: Sequence[Measured],
    cells: Mapping[Path, Mapping[str, Results]],
    live: Sequence[str],
) -> list[str]:
    real = [each for each in found if each.files[0].name in live]
    lines = []
    by_machine: dict[str, list[str]] = {}
    for each in real:
        by_machine.setdefault(_machine(each), []).append(f"[{each.name}](#{each.anchor})")
    lines += [f"- Real engines, {machine}: {', '.join(names)}." for machine, names in by_machine.items()]
    simulated = [f"[{each.name}](#{each.anchor})" for each in found if each not in real]
    simulated += [f"[{file.stem}](#{file.stem})" for file in cells]
    if simulated:
        what = "the live service on a simulated device, in virtual time"
        lines.append(f"- Simulated, {what}: {', '.join(simulated)}. {_SIMULATED}")
    lines.append(
        f"- Engine policy, forecasts, routing, faults and overheads alone: [{COMPONENTS}]({COMPONENTS})."
    )
    if missing := proposal_table.missing(folder):
        lines.append(f"- Not measured: {', '.join(missing)}.")
    return [*map(wrapped, lines), "", "On real engines the server knows how long each answer will be.", ""]


def _machine(measured: Measured) -> str:
    """Models and machine of an experiment on real engines."""
    machine = measured.results["environment"]
    where = f"{machine.get('gpu') or machine['cpu']}, {machine['cores']} cores"
    what = "models of 8 billion random weights" if machine.get("gpu") else "a tiny LLM and MiniLM"
    partial = ", interrupted and in no count below" if measured.results["partial"] else ""
    return f"{what} on {where}{partial}"


def _lost(folder: Path, compared: Sequence[comparison_tables.BaselineComparison]) -> list[str]:
    others = (
        loss._replace(subject=f"[{loss.subject}]({section})")
        for name, (section, losses) in other_losses.LOSSES.items()
        for file in folder.glob(name)
        for loss in losses(read_object(str(file)))
    )
    return other_losses.table(chain(comparison_tables.losses(compared), others))


def _ages(folder: Path, decisions: Path) -> str:
    names = [file.stem for file in folder.glob("*.json")]
    intro = "A result is repeated when there is time for it. Those before a decision precede later ones, too."
    return f"{intro}\n\n{result_age.table(names, decisions, 'decisions')}"


def _links(folder: Path, found: Iterable[Measured], cells: Iterable[Path]) -> Callable[[str], str]:
    anchors = {file.stem: f"#{each.anchor}" for each in found for file in each.files}
    anchors |= {file.stem: f"#{file.stem}" for file in cells}

    def link(name: str) -> str:
        heading = component_page.section_of(folder / f"{name}.json")
        part = f"{COMPONENTS}#{heading.lower().replace(' ', '-')}" if heading else None
        return f"[{name}]({anchors.get(name) or part or f'{FROM_PAGE}/{name}.json'})"

    return link
