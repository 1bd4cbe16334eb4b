"""What does a file of rows hold? CSV or JSON lines, plain or gzipped, read once for every reader here."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from benchmark_control_plane.common.arguments import BadInput

_FORMATS = (".csv", ".jsonl")


def rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """One mapping a row. Raises BadInput for a file that is absent or neither of the formats."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in _FORMATS:
        raise BadInput(f"{path}: rows come from .csv or .jsonl, either may end in .gz")
    try:
        with _opened(path) as file:
            yield from csv.DictReader(file) if kind == ".csv" else map(json.loads, file)
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror or error}; see the benchmark's README for the data"
        ) from error
    except (ValueError, EOFError, zlib.error, csv.Error) as error:
        raise BadInput(f"{path}: not rows of {kind[1:]} ({error})") from error


def column(row: Mapping[str, Any], name: str, path: Path) -> Any:
    """Raises BadInput naming the columns that there are."""
    try:
        return row[name]
    except KeyError:
        raise BadInput(f"{path}: no column {name!r}; it has {', '.join(map(str, row))}") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")
