"""Validates arguments and input files of commands; a fault is one line on stderr and exit status 2."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark_control_plane.common.results_file import write_json


class BadInput(ValueError):
    """An input file or option is invalid; the message is the line shown to the user."""


def read_object(path: str) -> Mapping[str, Any]:
    """Reads a JSON object; raises BadInput if the file is unreadable or holds anything else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; give the path of a readable JSON file") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: a JSON object is needed, not {type(content).__name__}")
    return content


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--data`."""
    parser.add_argument("--data", type=Path, help="folder of public data sets; default: TANDEM_DATA")


def data_folder_option(given: Path | None) -> Path:
    """Folder of public data sets, from the option, TANDEM_DATA or the default; it may not exist."""
    return given or Path(os.environ.get("TANDEM_DATA") or Path("..") / "shared" / "data")


def data_folder(given: Path | None, needed: str) -> Path:
    """Folder of public data sets; raises BadInput if it has no file `needed`."""
    stated = data_folder_option(given)
    if not (stated / needed).exists():
        raise BadInput(f"{stated}: no {needed}; name the data folder with --data DIR or TANDEM_DATA")
    return stated


def number(source: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """Finite number under `key`; raises BadInput if it is none, or missing without a default."""
    if key not in source:
        if default is None:
            raise BadInput(f"{key}: missing; it is required")
        return default
    return finite(source[key], key)


def finite(value: object, name: str) -> float:
    """`value` as a finite number; raises BadInput otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInput(f"{name}={value!r}: a finite number is needed")
    return float(value)


def integer(value: object, name: str, *, least: int) -> int:
    """`value` as an integer >= `least`, where 3.0 counts as 3; raises BadInput otherwise."""
    if (exact := finite(value, name)) != int(exact) or exact < least:
        raise BadInput(f"{name}={value!r}: an integer of at least {least} is needed")
    return int(exact)


def items(source: Mapping[str, Any], key: str) -> list[Any]:
    """List under `key`; raises BadInput if it is none."""
    value = source.get(key)
    if not isinstance(value, list):
        raise BadInput(f"{key}: a list is needed, not {type(value).__name__}")
    return value


def exit_status(command: Callable[[], int]) -> int:
    """Runs a command and returns its status; BadInput is printed to stderr and gives 2."""
    try:
        return command()
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2


def print_json(command: Callable[[], object], results: Path | None = None) -> int:
    """Prints a command's result as JSON and returns 0; BadInput is handled as in `exit_status`.

    The result is also written to the file `results`, if there is one.
    """

    def printed() -> int:
        found = command()
        if results is not None:
            write_json(results, found)
        print(json.dumps(found))
        return 0

    return exit_status(printed)
