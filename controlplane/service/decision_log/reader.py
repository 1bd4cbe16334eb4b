"""Reads a decision log as far as it is good, and says what it left out.

A segment may be torn (a crash, a full disk), missing, of another schema version, or not a log at all. A row
counts only if it has the fields that its kind must have.
"""

import gzip
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, Any, cast

import orjson

from controlplane.service.decision_log.log_rows import KNOWN_VERSIONS, Row, logged_id
from controlplane.service.decision_log.packed_rows import PackedRows
from controlplane.service.decision_log.segment_files import COMPRESSED, PLAIN, segments

_LONGEST_LINE = 4 * 2**20
_MOST_FOUND = 1_000
_VERSIONS = " and ".join(map(str, KNOWN_VERSIONS))
# How the rows of configurations begin.
_CONFIG = b'{"row":"config",'
_REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "request": {
        "at": int, "id": str, "kind": str, "class": str, "model": str, "tenant": str, "prompt_tokens": int,
        "sequences": int, "outcome": str, "decisions": list,
    },
    "sample": {"at": int, "owners": dict},
    "steps": {"at": int, "llm": (dict, type(None)), "passes": dict},
    "config": {"at": int, "version": int, "hash": str, "config": dict, "machine": dict},
    "segment": {"at": int, "schema": int, "run": str, "segment": int},
}  # fmt: skip


@dataclass(slots=True)
class DecisionLogRows:
    """The rows of a log in the order written, by kind, and one line for each thing that was left out."""

    requests: PackedRows = field(default_factory=PackedRows)
    samples: PackedRows = field(default_factory=PackedRows)
    steps: list[Row] = field(default_factory=list)
    configs: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_log(path: Path) -> DecisionLogRows:
    """Reads a folder of segments, or one segment. Raises OSError if `path` cannot be read.

    Each row gets the key `run`, since the numbers of blocks hold within one run of the server.
    """
    found = DecisionLogRows()
    last: dict[str, int] = {}
    many = {"request": found.requests, "sample": found.samples}
    few = {"steps": found.steps, "config": found.configs}
    for file in segments(path) if path.is_dir() else [_existing(path)]:
        run = None
        for line, row in _checked_rows(file, found.left_out):
            if (kind := row["row"]) == "segment":
                run, number = row["run"], row["segment"]
                if number != (expected := last.get(run, -1) + 1):
                    missing = f"{expected} to {number - 1}" if number > expected + 1 else f"{expected}"
                    found.left_out.append(f"run {run}: segment {missing} is missing")
                last[run] = number
            elif run is not None and kind in many:
                many[kind].append(line, run)
            elif run is not None:
                few[kind].append({**row, "run": run})
    return found


def find_request(folder: Path, request_id: str, *, seconds: float) -> list[tuple[Row, Row]]:
    """The rows of a request id, or of all requests of a client's id, the oldest first.

    Each comes with the section of its class in the configuration in force at its arrival, empty if it is not
    in the log. Reads the newest segments first and stops after `seconds`. At most the
    last 1,000 rows.
    """
    found: list[tuple[Row, Row]] = []
    deadline = monotonic() + seconds
    # Earlier releases wrote whole UUIDs.
    name = logged_id(request_id)
    wanted = [f'"id":"{each}'.encode() for each in {name, request_id}]
    for file in reversed(segments(folder)):
        here: deque[tuple[Row, Row]] = deque(maxlen=_MOST_FOUND)
        configs: list[Row] = []
        for line in _lines(file, []):
            if line.startswith(_CONFIG) and (row := _parsed(line)) is not None:
                configs.append(row)
            elif (
                any(each in line for each in wanted)
                and (row := _request(line)) is not None
                and name in ((known := logged_id(row["id"])), known.rpartition("-")[0])
            ):
                here.append((row, _class_section(row, configs)))
            if monotonic() > deadline:
                break
        found = [*here, *found][-_MOST_FOUND:]
        if len(found) == _MOST_FOUND or monotonic() > deadline:
            break
    return found


def _request(line: bytes) -> Row | None:
    row = _parsed(line)
    return row if row is not None and row["row"] == "request" else None


def _class_section(row: Row, configs: Sequence[Row]) -> Row:
    """The section of a request's class in the last of `configs` before its arrival, else in the first."""
    earlier = [each for each in configs if each["at"] <= row["at"]] or configs[:1]
    section: Row = earlier[-1]["config"].get("classes", {}).get(row["class"], {}) if earlier else {}
    return section


def _checked_rows(file: Path, left_out: list[str]) -> Iterator[tuple[bytes, Row]]:
    """The lines and rows of one segment; nothing of one that does not begin with a known version."""
    bad = 0
    has_head = False
    for line in _lines(file, left_out):
        row = _parsed(line)
        if not has_head:
            version = None if row is None or row["row"] != "segment" else row["schema"]
            if version not in KNOWN_VERSIONS:
                what = "no decision log" if version is None else f"schema version {version}"
                left_out.append(f"{file.name}: {what}; this program reads versions {_VERSIONS}")
                return
            has_head = True
        if row is None:
            bad += 1
        else:
            yield line, row
    if not has_head:
        left_out.append(f"{file.name}: empty")
    if bad:
        left_out.append(f"{file.name}: {bad:,} lines that are no rows of versions {_VERSIONS}")


def _lines(file: Path, left_out: list[str]) -> Iterator[bytes]:
    """The whole lines of a segment, as far as it can be read."""
    try:
        with _opened(file) as source:
            while line := source.readline(_LONGEST_LINE):
                if line.endswith(b"\n"):
                    yield line
                else:
                    left_out.append(
                        f"{file.name}: the last line is torn, or longer than {_LONGEST_LINE:,} bytes"
                    )
                    return
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        left_out.append(f"{file.name}: damaged after the rows read: {error}")
    except FileNotFoundError:
        left_out.append(f"{file.name}: deleted since the folder was listed")


def _existing(file: Path) -> Path:
    """The file, or its compressed form. Raises FileNotFoundError."""
    packed = file.with_suffix(COMPRESSED)
    if file.name.endswith(PLAIN) and not file.exists() and packed.exists():
        return packed
    file.stat()
    return file


def _opened(file: Path) -> IO[bytes]:
    if file.name.endswith(PLAIN):
        try:
            return file.open("rb")
        except FileNotFoundError:
            # Compressed since the folder was listed.
            file = file.with_suffix(COMPRESSED)
    return cast(IO[bytes], gzip.open(file))


def _parsed(line: bytes) -> Row | None:
    """The row of a line; None unless it has what its kind requires."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    required = _REQUIRED.get(str(row.get("row"))) if isinstance(row, dict) else None
    if required is None:
        return None
    for key, kind in required.items():
        value = row.get(key, ...)
        if not isinstance(value, kind) or isinstance(value, bool):
            return None
    return row  # type: ignore[no-any-return]
