"""The files of a decision log: numbered segments, compressed when they are full, the oldest deleted first.

A segment is named RUN-NUMBER.jsonl while it is written and RUN-NUMBER.jsonl.gz afterwards, where RUN begins
with the time of the start, so that names sort by time. Each begins with its head and the configuration in
force, so it can be read alone. Several servers may write to one folder: the file that was changed the longest
ago is deleted first, so never one that is still written.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from controlplane.service.decision_log.log_rows import Row

SEGMENT_BYTES = 64 * 2**20
PLAIN, COMPRESSED = ".jsonl", ".jsonl.gz"
_PARTIAL = ".part"
_LEVEL, _GZIP_FORMAT, _CHUNK = 9, 16 + zlib.MAX_WBITS, 1 << 20


class UpkeepFailed(OSError):
    """All rows are written, but a full segment was not compressed, or the oldest not deleted."""


class SegmentFiles:
    """Writes rows to the segments of one run; not safe to call in several threads at once."""

    def __init__(
        self,
        folder: Path,
        run: str,
        head: Callable[[int], Row],
        *,
        keep_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`head` returns the first row of a segment, by its number. At most `keep_bytes` stay in `folder`."""
        self._folder, self._run, self._head = folder, run, head
        # With smaller segments, deleting the oldest one deletes a smaller part of what is kept.
        self._keep_bytes, self._segment_bytes = keep_bytes, min(segment_bytes, max(1, keep_bytes // 4))
        self._file: BinaryIO | None = None
        self._size = self._number = 0
        self._config: Row | None = None

    def write(self, rows: Sequence[Row]) -> None:
        """Appends rows, of which the operating system then has every byte.

        Raises UpkeepFailed, or OSError if rows are lost; the segment may then end in a part of a row, and the
        next call begins another.
        """
        is_new = self._file is None
        try:
            if is_new:
                self._open()
            self._append(rows)
        except OSError:
            self._file = None
            raise
        finally:
            # Also after a failure: the next segment begins with the configuration in force.
            self._config = next((row for row in reversed(rows) if row["row"] == "config"), self._config)
        try:
            if self._size >= self._segment_bytes:
                self.close()
            elif is_new:
                self._delete_oldest()
        except OSError as error:
            raise UpkeepFailed(error.errno, error.strerror, error.filename) from error

    def close(self) -> None:
        """Compresses the present segment; `write` begins another. Raises OSError."""
        if (file := self._file) is None:
            return
        self._file = None
        file.close()
        plain = self._folder / f"{self._run}-{self._number - 1:06}{PLAIN}"
        packed, partial = plain.with_suffix(COMPRESSED), plain.with_suffix(_PARTIAL)
        try:
            _compress(plain, partial)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        partial.rename(packed)
        plain.unlink(missing_ok=True)
        self._delete_oldest()

    def _open(self) -> None:
        """Begins a segment, which exists only if it has its head."""
        path = self._folder / f"{self._run}-{self._number:06}{PLAIN}"
        self._file = path.open("wb")
        self._size = 0
        try:
            self._append([self._head(self._number), *([] if self._config is None else [self._config])])
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._number += 1

    def _append(self, rows: Iterable[Row]) -> None:
        text = b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for row in rows
        )
        assert self._file is not None
        self._file.write(text)
        self._file.flush()
        self._size += len(text)

    def _delete_oldest(self) -> None:
        """Deletes files until at most so many bytes are kept; those of an interrupted compression count."""
        found = []
        for path in self._folder.iterdir():
            if path.name.endswith((PLAIN, COMPRESSED, _PARTIAL)):
                # Another server may have deleted it since.
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    found.append((stat.st_mtime_ns, path, stat.st_size))
        total = sum(size for *_, size in found)
        for _, path, size in sorted(found):
            if total <= self._keep_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _compress(plain: Path, target: Path) -> None:
    # Most of a row is digits that repeat by chance: a short match elsewhere costs more than the digits.
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP_FORMAT, strategy=zlib.Z_FILTERED)
    with plain.open("rb") as source, target.open("wb") as packed:
        while chunk := source.read(_CHUNK):
            packed.write(packer.compress(chunk))
        packed.write(packer.flush())


def segments(folder: Path) -> list[Path]:
    """The segments in a folder, the oldest first; of one that is there in both forms, the compressed one."""
    found = {path.name: path for path in folder.iterdir() if path.name.endswith((PLAIN, COMPRESSED))}
    return [found[name] for name in sorted(found) if f"{name}{COMPRESSED.removeprefix(PLAIN)}" not in found]
