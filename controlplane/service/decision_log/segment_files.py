"""The files of a decision log: numbered segments, compressed when they are full, the oldest deleted first.

A segment is named RUN-NUMBER.jsonl while it is written and RUN-NUMBER.jsonl.gz afterwards, where RUN begins
with the time of the start, so that names sort by time. Each begins with its head and the configuration in
force, so it can be read alone.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from controlplane.service.decision_log.log_rows import Row

SEGMENT_BYTES = 64 * 2**20
PLAIN, COMPRESSED = ".jsonl", ".jsonl.gz"
_LEVEL, _GZIP_FORMAT, _CHUNK = 9, 16 + zlib.MAX_WBITS, 1 << 20


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

        Raises OSError; the segment may then end in a part of a row, and the next call begins another.
        """
        try:
            if self._file is None:
                self._open()
            self._append(rows)
        except OSError:
            self._file = None
            raise
        finally:
            # Also after a failure: the next segment begins with the configuration in force.
            self._config = next((row for row in reversed(rows) if row["row"] == "config"), self._config)
        if self._size >= self._segment_bytes:
            self.close()

    def close(self) -> None:
        """Compresses the present segment; `write` begins another. Raises OSError."""
        if (file := self._file) is None:
            return
        self._file = None
        file.close()
        plain = self._folder / f"{self._run}-{self._number - 1:06}{PLAIN}"
        packed, partial = plain.with_suffix(COMPRESSED), plain.with_suffix(".part")
        # Most of a row is digits that repeat by chance: a short match elsewhere costs more than the digits.
        packer = zlib.compressobj(_LEVEL, wbits=_GZIP_FORMAT, strategy=zlib.Z_FILTERED)
        with plain.open("rb") as source, partial.open("wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(packer.compress(chunk))
            target.write(packer.flush())
        partial.rename(packed)
        plain.unlink()
        self._delete_oldest()

    def _open(self) -> None:
        self._file = (self._folder / f"{self._run}-{self._number:06}{PLAIN}").open("wb")
        self._size = 0
        self._number += 1
        self._append([self._head(self._number - 1)])
        if self._config is not None:
            self._append([self._config])

    def _append(self, rows: Iterable[Row]) -> None:
        text = b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for row in rows
        )
        assert self._file is not None
        self._file.write(text)
        self._file.flush()
        self._size += len(text)

    def _delete_oldest(self) -> None:
        sizes = [(path, path.stat().st_size) for path in segments(self._folder)]
        total = sum(size for _, size in sizes)
        for path, size in sizes:
            if total <= self._keep_bytes:
                return
            path.unlink()
            total -= size


def segments(folder: Path) -> list[Path]:
    """The segments in a folder, the oldest first; of one that is there in both forms, the compressed one."""
    found = {path.name: path for path in folder.iterdir() if path.name.endswith((PLAIN, COMPRESSED))}
    return [found[name] for name in sorted(found) if f"{name}{COMPRESSED.removeprefix(PLAIN)}" not in found]
