"""Writes the results of an experiment to the named file atomically, or prints them on the last line.

The file is replaced only by a complete result, or by a complete part of a study that runs in parts. An
interrupted run therefore leaves the previous results, and a reader sees either the old or the new figures.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[1] / "results"


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--results`."""
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="file to write the results to; default: print them"
    )


def read_previous(file: Path | None) -> dict[str, Any]:
    """Previous results that a resumed study extends; empty if there are none."""
    if file is None or not file.exists():
        return {}
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def write_or_print(file: Path | None, found: object) -> None:
    """Writes results as JSON to `file`, or prints them if it is None."""
    if file is None:
        print(json.dumps(found))
    else:
        write_json(file, found)


def file_name(of: str) -> str:
    """The name of a file or folder about something: letters and digits, a dash for anything else."""
    return "".join(letter if letter.isalnum() else "-" for letter in of)


def write_json(file: Path, found: object) -> None:
    """Replaces `file` atomically with JSON."""
    write_atomic(file, json.dumps(found, indent=1) + "\n")


def write_atomic(file: Path, text: str) -> None:
    """Replaces `file` with `text` by a rename, so readers see the old or the new content."""
    scratch = file.with_name(f".{file.name}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)
