"""Writes rows from one thread behind a bounded queue, so that a slow disk costs rows and not requests."""

import logging
import queue
import threading

from controlplane.service.decision_log.log_rows import Row
from controlplane.service.decision_log.segment_files import SegmentFiles, UpkeepFailed
from controlplane.service.runtime.health_tracker import HealthTracker

log = logging.getLogger(__name__)

QUEUED_ROWS = 10_000
_GATHER_SECONDS = 0.25
_STOP_SECONDS = 10.0


class LogWriter:
    """Writes rows to `files` in the order of `put`.

    From `start` on a thread writes them, those of `gather_seconds` at once, and a row that finds `capacity`
    others waiting is dropped, except a configuration, under which the rows after it are read. Without a
    start, as in virtual time, `put` writes the row itself.

    Attributes:
        written: rows written.
    """

    def __init__(
        self, files: SegmentFiles, *, capacity: int = QUEUED_ROWS, gather_seconds: float = _GATHER_SECONDS
    ) -> None:
        self.written = 0
        # One counter for each thread: an addition in one would undo that of the other.
        self._unqueued = self._unwritten = 0
        self.health = HealthTracker("writing the decision log failed", "the decision log is written again")
        self._files = files
        self._capacity, self._gather_seconds = capacity, gather_seconds
        self._is_awaited = threading.Event()
        self._queue: queue.SimpleQueue[Row | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Rows lost: the queue was full, a row could not be built, or the disk failed."""
        return self._unqueued + self._unwritten

    def row_failed(self) -> None:
        """Counts a row that could not be built."""
        self._unqueued += 1

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._write_queued, name="decision log", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Hands over a row; it must not change afterwards."""
        if self._thread is None:
            self._write([row])
            return
        if self._queue.qsize() < self._capacity or row["row"] == "config":
            self._queue.put(row)
        else:
            self._unqueued += 1

    def flush(self, timeout: float) -> bool:
        """Whether all rows put so far were written within `timeout` seconds; call it in another thread."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        self._queue.put(is_done)
        self._is_awaited.set()
        return is_done.wait(timeout)

    def close(self) -> None:
        """Writes the rows that wait, and ends the file; a disk that hangs is abandoned after ten seconds."""
        if (thread := self._thread) is not None:
            self._queue.put(None)
            self._is_awaited.set()
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                self._unqueued += self._queue.qsize() - 1
                log.error(
                    "the decision log is not complete: its disk has not answered for %g s", _STOP_SECONDS
                )
                return
            self._thread = None
        try:
            self._files.close()
        except OSError as error:
            self.health.failed(error)

    def _write_queued(self) -> None:
        while True:
            items = [self._queue.get()]
            # Each time that this thread wakes up, the event loop waits for the interpreter lock.
            self._is_awaited.wait(self._gather_seconds)
            self._is_awaited.clear()
            while not self._queue.empty():
                items.append(self._queue.get())
            if rows := [item for item in items if isinstance(item, dict)]:
                self._write(rows)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                return

    def _write(self, rows: list[Row]) -> None:
        try:
            self._files.write(rows)
        except UpkeepFailed as error:
            self.written += len(rows)
            self.health.failed(error)
        except Exception as error:
            # Whatever one row holds, the thread goes on: the rows are counted, and the log says why.
            self._unwritten += len(rows)
            self.health.failed(error)
        else:
            self.written += len(rows)
            self.health.succeeded()
