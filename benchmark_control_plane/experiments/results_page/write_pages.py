"""Writes docs/results.md, the results in README.md and the charts on real engines from committed results.

    python -m benchmark_control_plane.experiments.results_page.write_pages [--check | --keep DIR]

README.md is changed only between its two marks. Figures are quoted from the files in
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
    matrix_table,
    other_losses,
    proposal_table,
    result_age,
    result_rows,
)
from benchmark_control_plane.report.headline import headline
from benchmark_control_plane.report.matrix_results import MATRIX, MATRIX_FORMAT, matrix_cells
from benchmark_control_plane.report.page import picture
from benchmark_control_plane.report.results_folder import committed, read_results
from benchmark_control_plane.report.schema import FORMAT, Results, results_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmark_control_plane" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
REAL_ENGINES = (
    "mix-memory.json",
    "mix-compute.json",
    "mix-light.json",
    "mix-bursty.json",
    "mix-documents.json",
    "mix-memory-tuned.json",
    "head-to-head.json",
    "mix-compute-strict.json",
    "one-gpu.json",
)
"""Experiments with a chart; README.md quotes the first two of those with results."""
IN_FULL = (
    *REAL_ENGINES,
    "simulated-mix-memory.json",
    "simulated-mix-compute.json",
    "simulated-mix-light.json",
    "simulated-mix-prefill.json",
)
COMMAND = "python -m benchmark_control_plane.experiments.results_page.write_pages"
BEGIN, END = f"<!-- Measured: written by {COMMAND} -->", "<!-- End of what was measured -->"

DECISIONS = ROOT / "docs" / "decisions"
_FROM_PAGE = "../benchmark_control_plane/results"
_OTHER = "Other experiments"
_TITLE = f"""<!-- Written by {COMMAND}; do not edit. -->

# Measured results

A request meets its SLO if it meets every objective of its class; a rejected, evicted or failed request is a
miss. A cell is one load of one experiment, a point is one percent of its requests, and the best baseline is
the best one at that load.
"""
_CAVEAT = """
Real engines here are a tiny model on two CPU cores, with answers whose lengths the server knows. The
baselines of the simulated device are mostly the same engines without a gate.
[How to read this page](#how-to-read-this-page) follows the tables over all experiments.
"""
_READING = f"""## How to read this page

Every figure on this page is read from the JSON file linked in its row. Experiments with a machine
named below their table ran on real engines. The other results of `tandem bench run` come
from the live service on a simulated device in virtual time; "virtual time" elsewhere means vLLM's own
scheduler, stepped with modelled step times. The rate at an attainment is interpolated between the
measured loads, and a load stands for its nominal rate; a dash means that no offered load reached the
attainment, or that no seed has valid runs on both sides of it. In a range "none" is a seed of which no
offered load reached it, and "at least" one of which every load did. A seed without them is left out of the
rate. Goodput is the number of requests per second that met their SLO. Values are medians over the seeds with
the range in parentheses, unless a row says otherwise.
[benchmarking.md](benchmarking.md) describes the method,
[the table of commands](../benchmark_control_plane/README.md) says how to repeat each measurement.

{result_age.explanation("decisions/README.md")}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done or up to date, 1 not up to date, 2 README.md or a result is wrong."""
    parser = argparse.ArgumentParser(
        description="Write the committed results into docs/results.md and README.md."
    )
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


def expected_files(readme: Path = README, page: Path = PAGE, folder: Path = RESULTS) -> dict[Path, str]:
    """The text that each written file should hold."""
    pictures = {
        file.with_suffix(".svg"): picture(results)
        for file, results in experiments(folder)
        if file.name in REAL_ENGINES
    }
    front = replace_block(readme.read_text(encoding="utf-8"), readme_block(folder))
    return {readme: front, page: results_page(folder)} | pictures


def experiments(folder: Path) -> Iterator[tuple[Path, Results]]:
    """The results of `tandem bench run` among all result files."""
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == FORMAT:
            yield file, results_of(content, file.name)


def matrices(folder: Path) -> Iterator[tuple[Path, dict[str, Results]]]:
    """Results by cell of each matrix among all result files."""
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format") == MATRIX_FORMAT:
            yield file, matrix_cells(content, file.name)


def replace_block(text: str, content: str) -> str:
    """Raises BadInput if the marks are not there once each, in order."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end) or BEGIN in rest or END in after:
        raise BadInput(f"README.md: the lines {BEGIN!r} and {END!r} are needed once each, in this order")
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def readme_block(folder: Path) -> str:
    """Two experiments on real engines and the first row of each file in `result_rows.IN_README`."""
    found = {file.name: (file, results) for file, results in experiments(folder)}
    rows = [
        (_question(results, file)[1], _finding(file, results), file, file.stem)
        for file, results in [found[name] for name in REAL_ENGINES if name in found][:2]
    ]
    for name in result_rows.IN_README:
        heading, quote = result_rows.QUOTES[name]
        for file in folder.glob(name):
            question, result = next(quote(read_object(str(file))))
            rows.append((question, result, file, heading.lower().replace(" ", "-")))
    lines = (
        f"| {question} | {result} | {_link_in_readme(file, anchor)} |"
        for question, result, file, anchor in rows
    )
    state = comparison_tables.summary(_compared(folder, found.values()), REAL_ENGINES)
    first = (
        f"Against the best baseline at each load, Tandem is {state}; "
        "[where it is behind, and why](docs/results.md#where-tandem-is-behind)."
    )
    return "\n".join((first, "", "| measured | result | source |", "|---|---|---|", *lines, ""))


def _finding(file: Path, results: Results) -> str:
    """The headline, and the lead at each load."""
    compared = comparison_tables.comparisons([(file, file.stem, results)])
    points = [f"points ahead of the best baseline: {comparison_tables.points(one)}" for one in compared]
    return "; ".join((headline(results).rstrip("."), *points))


def _compared(
    folder: Path, known: Iterable[tuple[Path, Results]]
) -> list[comparison_tables.BaselineComparison]:
    """All comparisons with baselines, those on real engines first; `known` are the folder's experiments."""
    found = [(file, file.stem, results) for file, results in known]
    found.sort(key=lambda each: _live_first(each[0].name))
    cells = [
        (file, f"{file.stem}, {cell}", results)
        for file, by_cell in matrices(folder)
        for cell, results in by_cell.items()
    ]
    return comparison_tables.comparisons([*found, *cells])


def _live_first(name: str) -> int:
    return REAL_ENGINES.index(name) if name in REAL_ENGINES else len(REAL_ENGINES)


def _first_tables(folder: Path, known: Iterable[tuple[Path, Results]]) -> str:
    """Where Tandem is behind and ahead, what classes and mechanisms gain, and what the proposal asked."""
    compared = _compared(folder, known)
    others = [
        [*row, _link(file)]
        for name, losses in other_losses.LOSSES.items()
        for file in folder.glob(name)
        for row in losses(read_object(str(file)))
    ]
    sections = (
        ("Where Tandem is behind", _behind(comparison_tables.lost_rows(compared, _link))),
        ("Where Tandem is ahead", comparison_tables.ahead_table(compared, _link)),
        ("Other comparisons that are lost", _behind(others)),
        ("Classes that give way", comparison_tables.classes_table(compared, _link)),
        ("What each mechanism earns", comparison_tables.mechanisms_table(compared, _link)),
        ("The experiments of the proposal", proposal_table.table(folder, _link)),
    )
    state = [f"Against it, Tandem is {comparison_tables.summary(compared, REAL_ENGINES)}."]
    if rates := comparison_tables.live_rates(compared, REAL_ENGINES):
        state.append(
            "Its rate at 90 % attainment on real engines, relative to a virtual best baseline, which is the "
            f"best of them on each seed: {rates}."
        )
    if missing := proposal_table.missing(folder):
        state.append(f"Not measured: {', '.join(missing)}.")
    parts = ["\n".join((f"## {heading}", "", *lines)) for heading, lines in sections]
    return "\n".join((_TITLE, *state, _CAVEAT, *parts, _READING))


def _behind(rows: Iterable[Sequence[str]]) -> list[str]:
    head = ["where", "by how much", "against", "reason", "source"]
    return bench_tables.markdown_table(head, rows, has_texts=True)


def results_page(folder: Path) -> str:
    """The text of docs/results.md."""
    found = list(experiments(folder))
    parts = [_first_tables(folder, found)]
    for name in IN_FULL:
        for file, results in found:
            if file.name == name:
                drawn = f"{_FROM_PAGE}/{file.stem}.svg" if name in REAL_ENGINES else None
                question = _question(results, file)[1]
                end = "" if question.endswith("?") else "."
                parts.append(f"## {file.stem.capitalize()}\n\n{question}{end}")
                parts.append(bench_tables.full(results, drawn, _link(file)))
    for file, cells in matrices(folder):
        question = next(iter(cells.values()))["experiment"]["question"]
        parts.append(f"## {file.stem.capitalize()}\n\n{question}\n")
        parts.append(matrix_table.full(cells, _link(file)))
    rows: dict[str, list[str]] = {heading: [] for heading in (*result_rows.HEADINGS, _OTHER)}
    for file, results in sorted(found, key=lambda each: _place(each[0].stem)):
        if file.name not in (*IN_FULL, *result_rows.QUOTES, *result_rows.TABLES):
            heading, question = _question(results, file)
            rows[heading].append(_row(question, bench_tables.rates(results), file))
    for pattern, (heading, quote) in result_rows.QUOTES.items():
        for file in sorted(folder.glob(pattern)):
            rows[heading] += [_row(*row, file) for row in quote(read_object(str(file)))]
    tables: dict[str, list[str]] = {heading: [] for heading in rows}
    for name, (heading, table) in result_rows.TABLES.items():
        for file in folder.glob(name):
            tables[heading].append(table(read_object(str(file)), _link(file)))
    for heading, lines in rows.items():
        if lines:
            tables[heading].append("\n".join(("| measured | result | source |", "|---|---|---|", *lines, "")))
        if tables[heading]:
            parts.append(f"## {heading}\n\n" + "\n".join(tables[heading]))
    return "\n".join(parts)


def _place(name: str) -> int:
    known = list(result_rows.BENCH_QUESTIONS)
    return known.index(name) if name in known else len(known)


def _question(results: Results, file: Path) -> tuple[str, str]:
    """(heading, question); those of the results file for an experiment that result_rows.py does not list."""
    return result_rows.BENCH_QUESTIONS.get(file.stem, (_OTHER, results["experiment"]["question"]))


def _row(question: str, result: str, file: Path) -> str:
    return f"| {question} | {result} | {_link(file)} |"


def _link(file: Path) -> str:
    """The link to a result from docs/results.md, and what it precedes."""
    return f"[{file.stem}]({_FROM_PAGE}/{file.name}){result_age.remark(file.stem, DECISIONS, 'decisions')}"


def _link_in_readme(file: Path, anchor: str) -> str:
    age = result_age.remark(file.stem, DECISIONS, "docs/decisions")
    own = f"[{file.stem}](benchmark_control_plane/results/{file.name})"
    return f"{own}, [details](docs/results.md#{anchor}){age}"


if __name__ == "__main__":
    sys.exit(main())
