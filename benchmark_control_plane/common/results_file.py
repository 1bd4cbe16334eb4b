"""Where is what was measured kept, and how? Where the caller says, replaced in one step by something whole.

Rule: nothing is written unless a file is named; what is not written is printed, last and on one line. Until a
measurement, or a part of it that stands by itself, is complete, the file of before stays. So a run that is
interrupted takes nothing away, and a reader sees the old figures or the new ones.
"""

import argparse
import json
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[1] / "results"


def add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, metavar="FILE", help="where to keep what is found")


def read_previous(file: Path | None) -> dict[str, Any]:
    """What a study that grows goes on from."""
    if file is None or not file.exists():
        return {}
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def write_or_print(file: Path | None, found: object) -> None:
    if file is None:
        print(json.dumps(found))
    else:
        write_json(file, found)


def write_json(file: Path, found: object) -> None:
    """As JSON."""
    write_atomic(file, json.dumps(found, indent=1) + "\n")


def write_atomic(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)
