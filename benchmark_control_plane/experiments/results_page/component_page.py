"""Markdown of docs/component-results.md: results of single parts, which no experiment compares by load."""

from collections.abc import Iterator
from pathlib import Path

from benchmark_control_plane.common.command_line import read_object
from benchmark_control_plane.experiments.results_page import fleet_tables, result_age, result_rows
from benchmark_control_plane.experiments.results_page.bench_tables import markdown_table

_TITLE = """
# Measured parts

Results of the engine policy, forecasts, routing, faults and overheads, each alone. [results.md](results.md)
compares whole systems, and lists what is lost here, too. "Virtual time" means vLLM's own scheduler, stepped
with modelled step times; goodput is the number of requests per second that met their SLO. *(0028)* beside a
file: it precedes that [decision](results.md#results-of-present-and-of-older-rules).
"""


def page(folder: Path, results: str) -> str:
    """The text of the page; `results` leads from it to `folder`."""
    parts = [_TITLE]
    used: list[Path] = []
    for heading in result_rows.HEADINGS:
        lines = list(_section(heading, folder, used))
        if lines:
            parts.append("\n".join((f"## {heading}", "", *lines)))
    parts.append("\n".join(f"[{file.stem}]: {results}/{file.name}" for file in dict.fromkeys(used)))
    return "\n".join(parts) + "\n"


def section_of(file: Path) -> str | None:
    """The heading under which the page quotes a file; None if it does not."""
    listed = {**result_rows.QUOTES, **result_rows.TABLES}
    if any(file.name in names for names, _ in fleet_tables.TABLES):
        return result_rows.FLEET
    return next((heading for pattern, (heading, _) in listed.items() if file.match(pattern)), None)


def _section(heading: str, folder: Path, used: list[Path]) -> Iterator[str]:
    """Adds the files that it quotes to `used`."""
    for name, (place, table) in result_rows.TABLES.items():
        for file in folder.glob(name):
            if place == heading:
                used.append(file)
                yield table(read_object(str(file)), _reference(file))
    if heading == result_rows.FLEET:
        for names, tables in fleet_tables.TABLES:
            files = [folder / name for name in names if (folder / name).exists()]
            used += files
            if files:
                yield from tables({_reference(file): read_object(str(file)) for file in files})
    rows = []
    for pattern, (place, quote) in result_rows.QUOTES.items():
        for file in sorted(folder.glob(pattern)):
            if place == heading:
                used.append(file)
                rows += [[*row, _reference(file)] for row in quote(read_object(str(file)))]
    if rows:
        yield from markdown_table(["measured", "result", "data"], rows, has_texts=True)


def _reference(file: Path) -> str:
    """The link by reference, and the decision that the result precedes."""
    older = result_age.PRECEDES.get(file.stem)
    return f"[{file.stem}] *({older})*" if older else f"[{file.stem}]"
