"""Reads rows from CSV or JSON Lines files, plain or gzipped."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from benchmark_control_plane.common.command_line import BadInput

_FORMATS = (".csv", ".jsonl")


def rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields one mapping per row that is not empty; raises BadInput if the file is in neither format."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in _FORMATS:
        raise BadInput(f"{path}: must be .csv or .jsonl, optionally with .gz")
    try:
        with _opened(path) as file:
            yield from csv.DictReader(file) if kind == ".csv" else map(json.loads, filter(str.strip, file))
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror or error}; the benchmark's README says where the data comes from"
        ) from error
    except (ValueError, EOFError, zlib.error, csv.Error) as error:
        raise BadInput(f"{path}: not rows of {kind[1:]} ({error})") from error


def column(row: Mapping[str, Any], name: str, path: Path) -> Any:
    """Value of a column; raises BadInput with the existing columns if it is missing."""
    try:
        return row[name]
    except KeyError:
        raise BadInput(f"{path}: no column {name!r}; it has {', '.join(map(str, row))}") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")
