"""Writes the pages of results, those in README.md and the charts on real engines from committed results.

    python -m benchmark_control_plane.experiments.results_page.write_pages [--check | --keep DIR]

docs/results.md compares systems, docs/component-results.md has single parts, and README.md is changed only
between its two marks. Figures are quoted from the files in
benchmark_control_plane/results and written nowhere else; a file that is absent is not quoted. `--keep` first
copies the results of a folder of `tandem bench run`, made small, to the committed ones.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmark_control_plane.common.command_line import BadInput, read_object
from benchmark_control_plane.common.results_file import write_atomic
from benchmark_control_plane.experiments.results_page import (
    bench_tables,
    comparison_tables,
    component_page,
    front_page,
    matrix_table,
    result_age,
    result_rows,
)
from benchmark_control_plane.experiments.results_page.kept_results import (
    Measured,
    experiments,
    matrices,
    merged,
)
from benchmark_control_plane.report import aggregates
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.matrix_results import MATRIX
from benchmark_control_plane.report.page import picture
from benchmark_control_plane.report.results_folder import committed, read_results
from benchmark_control_plane.report.schema import Results

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmark_control_plane" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
COMPONENTS = PAGE.with_name(front_page.COMPONENTS)
REAL_ENGINES = (
    "mix-memory.json",
    "mix-compute.json",
    "mix-compute-no-idle.json",
    "mix-light.json",
    "mix-bursty.json",
    "mix-documents.json",
    "head-to-head.json",
    "mix-compute-strict.json",
    "workflow-engines.json",
    "one-gpu.json",
)
"""Experiments with a chart; README.md quotes the first two of those with results."""
JUDGED = dict.fromkeys(("workflow", "workflow-engines", "workflow-trace"), "answers")
"""The class by which an experiment is judged, where it is not all requests."""
COMMAND = "python -m benchmark_control_plane.experiments.results_page.write_pages"
BEGIN, END = f"<!-- Measured: written by {COMMAND} -->", "<!-- End of what was measured -->"

DECISIONS = ROOT / "docs" / "decisions"
_GENERATED = f"<!-- Written by {COMMAND}; do not edit. -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done or up to date, 1 not up to date, 2 README.md or a result is wrong."""
    parser = argparse.ArgumentParser(description="Write the committed results into the pages and README.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page is out of date"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="first commit the results of this folder")
    options = parser.parse_args(arguments)
    try:
        if options.keep is not None:
            _keep(options.keep)
        changed = {
            file: text
            for file, text in expected_files().items()
            if not file.exists() or file.read_text() != text
        }
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        return int(bool(changed))
    for file, text in changed.items():
        write_atomic(file, text)
    return 0


def _keep(folder: Path) -> None:
    """Copies the results of an experiment or a matrix to the committed ones."""
    if (matrix := folder / MATRIX).exists():
        content = read_object(str(matrix))
        name, text = content["name"], json.dumps(content, separators=(",", ":")) + "\n"
        ours = {known for known, _ in matrices(RESULTS)}
    else:
        results = read_results(folder)
        name, text = results["experiment"]["name"], committed(results)
        ours = {known for known, _ in experiments(RESULTS)}
    file = RESULTS / f"{name}.json"
    if file.exists() and file not in ours:
        raise BadInput(f"{file.name} holds the result of another benchmark; rename the experiment")
    write_atomic(file, text)


def expected_files(
    readme: Path = README, page: Path = PAGE, components: Path = COMPONENTS, folder: Path = RESULTS
) -> dict[Path, str]:
    """The text that each written file should hold."""
    found = list(experiments(folder))
    pictures = {
        file.with_suffix(".svg"): picture(results) for file, results in found if file.name in REAL_ENGINES
    }
    front = replace_block(readme.read_text(encoding="utf-8"), readme_block(folder, found))
    parts = _GENERATED + component_page.page(folder, front_page.FROM_PAGE)
    return {readme: front, page: results_page(folder), components: parts} | pictures


def replace_block(text: str, content: str) -> str:
    """Raises BadInput if the marks are not there once each, in order."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end) or BEGIN in rest or END in after:
        raise BadInput(f"README.md: the lines {BEGIN!r} and {END!r} are needed once each, in this order")
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def readme_block(folder: Path, found: Iterable[tuple[Path, Results]]) -> str:
    """Two experiments on real engines and the first row of each file in `result_rows.IN_README`."""
    known = merged(list(found))
    live = {each.files[0].name: each for each in known if each.files[0].name in REAL_ENGINES}
    rows = [
        (_question(each), _finding(each), each.files[0], f"results.md#{each.anchor}")
        for each in [live[name] for name in REAL_ENGINES if name in live][:2]
    ]
    for name in result_rows.IN_README:
        heading, quote = result_rows.QUOTES[name]
        for file in folder.glob(name):
            question, result = next(quote(read_object(str(file))))
            anchor = heading.lower().replace(" ", "-")
            rows.append((question, result, file, f"{front_page.COMPONENTS}#{anchor}"))
    lines = (
        f"| [{question}](docs/{place}) | {result} "
        f"| [{result_age.rules(file.stem)}](benchmark_control_plane/results/{file.name}) |"
        for question, result, file, place in rows
    )
    summary = comparison_tables.summary(_compared(folder, known))
    first = (
        f"Against the best baseline at each load, Tandem is {summary}; "
        "[where it loses, and why](docs/results.md#where-tandem-loses)."
    )
    return "\n".join((first, "", "| measured | result | rules, data |", "|---|---|---|", *lines, ""))


def _finding(measured: Measured) -> str:
    """The headline, and the lead at each load."""
    points = [
        f"points ahead of the best baseline: {comparison_tables.points(one)}"
        for one in _comparisons_of(measured)
    ]
    return "; ".join((headline(measured.results).rstrip("."), *points))


def _compared(folder: Path, known: Iterable[Measured]) -> list[comparison_tables.BaselineComparison]:
    """All comparisons with baselines, those on real engines first; `known` are the folder's experiments."""
    found = [one for each in sorted(known, key=_live_first) for one in _comparisons_of(each)]
    for file, cells in matrices(folder):
        rules = result_age.rules(file.stem)
        for cell, results in cells.items():
            name = f"{file.stem}, {cell}"
            found += comparison_tables.comparisons(name, file.stem, rules, results, is_live=False)
    return found


def _comparisons_of(each: Measured) -> Iterator[comparison_tables.BaselineComparison]:
    is_live = each.files[0].name in REAL_ENGINES
    rules = result_age.rules(each.files[0].stem)
    return comparison_tables.comparisons(each.name, each.anchor, rules, each.results, is_live=is_live)


def _live_first(each: Measured) -> int:
    name = each.files[0].name
    return REAL_ENGINES.index(name) if name in REAL_ENGINES else len(REAL_ENGINES)


def results_page(folder: Path) -> str:
    """The text of docs/results.md."""
    found = sorted(merged(list(experiments(folder))), key=_live_first)
    cells = dict(matrices(folder))
    compared = _compared(folder, found)
    front = front_page.front(folder, found, cells, compared, REAL_ENGINES, DECISIONS)
    parts = [f"{_GENERATED}\n# Measured results\n", front]
    for each in found:
        first = each.files[0]
        drawn = f"{front_page.FROM_PAGE}/{first.stem}.svg" if first.name in REAL_ENGINES else None
        links = ", ".join(map(_link, each.files))
        judged = JUDGED.get(first.stem, aggregates.OVERALL)
        table = bench_tables.full(each.results, drawn, links, judged)
        parts.append(f"## {each.heading}\n\n{_question(each)}\n{table}")
    for file, by_cell in cells.items():
        question = next(iter(by_cell.values()))["experiment"]["question"]
        parts.append(f"## {file.stem.capitalize()}\n\n{question}\n")
        parts.append(matrix_table.full(by_cell, _link(file)))
    return "\n".join(parts)


def _question(each: Measured) -> str:
    return each.results["experiment"]["question"]


def _link(file: Path) -> str:
    """The link to a result from docs/results.md, and what it precedes."""
    return f"[{file.stem}]({front_page.FROM_PAGE}/{file.name}), {result_age.rules(file.stem)}"


if __name__ == "__main__":
    sys.exit(main())
