"""Prints tables: coloured with `rich` on a terminal where it is installed, otherwise aligned plain text."""

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

COLOURS = {
    "on": "green", "off": "yellow", "kept": "green", "missed": "red",
    "live": "green", "live where quotas move": "green", "needs a restart": "yellow",
    "ADMIT": "green", "ADMIT_WITH_PREEMPTION": "green", "DEFER": "yellow", "PREEMPTED": "yellow",
    "REJECT": "red",
}  # fmt: skip
"""Colour of a cell by its text."""


def has_colours() -> bool:
    """Whether tables are coloured: standard output is a terminal, and `rich` is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table with one line per row; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    is_number = [all(_is_number(row[i]) for row in cells) for i in range(len(header))]
    if has_colours():
        _print_coloured(title, header, cells, is_number)
        return
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(f"{title}:")
    for row in [list(header), *cells]:
        parts = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ]
        print(("  " + "  ".join(parts)).rstrip())


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "", 1).rstrip("%").strip().isdigit()


def _print_coloured(
    title: str, header: Sequence[str], cells: Sequence[Sequence[str]], is_number: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for name, number in zip(header, is_number, strict=True):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(table)
