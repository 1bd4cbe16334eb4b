"""What did the caller hand a command? JSON and folders checked at the edge: one clear line, exit 2."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class BadInput(ValueError):
    """The caller's file or option is at fault. The message is the one line they will see."""


def read_object(path: str) -> Mapping[str, Any]:
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
    parser.add_argument("--data", type=Path, help="folder of public data; default TANDEM_DATA")


def stated_data(given: Path | None) -> Path:
    """Where public data lies, if it is there."""
    return given or Path(os.environ.get("TANDEM_DATA") or Path("..") / "shared" / "data")


def data_folder(given: Path | None, needed: str) -> Path:
    """The folder of public data, which must have `needed` in it."""
    stated = stated_data(given)
    if not (stated / needed).exists():
        raise BadInput(f"{stated}: no {needed}; give the data folder by --data DIR or TANDEM_DATA")
    return stated


def number(source: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A finite number under `key`; without a default the key is required."""
    if key not in source:
        if default is None:
            raise BadInput(f"{key}: missing; it is required")
        return default
    return finite(source[key], key)


def finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInput(f"{name}={value!r}: a finite number is needed")
    return float(value)


def whole(value: object, name: str, *, least: int) -> int:
    """An integer of at least `least`; 3.0 counts as 3."""
    if (exact := finite(value, name)) != int(exact) or exact < least:
        raise BadInput(f"{name}={value!r}: an integer of at least {least} is needed")
    return int(exact)


def items(source: Mapping[str, Any], key: str) -> list[Any]:
    value = source.get(key)
    if not isinstance(value, list):
        raise BadInput(f"{key}: a list is needed, not {type(value).__name__}")
    return value


def exit_status(command: Callable[[], int]) -> int:
    """The command's own; a BadInput goes to stderr as one line and gives 2."""
    try:
        return command()
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2


def exit_code(command: Callable[[], object]) -> int:
    """Prints the command's result as JSON; a BadInput is told as by `exit_status`."""

    def printed() -> int:
        print(json.dumps(command()))
        return 0

    return exit_status(printed)
