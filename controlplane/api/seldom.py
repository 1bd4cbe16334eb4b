"""What is worth a line of the log when every request fails alike? The first, and how many came since."""

import logging

_SECONDS = 10.0
_MOST_LINES = 100


class Seldom(logging.Filter):
    """A line that was told less than ten seconds ago is counted, and told with the next like it."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if record.exc_info is not None:
            return True
        told_at = self._told.get(line)
        if told_at is not None and record.created - told_at < _SECONDS:
            self._kept_back[line] = self._kept_back.get(line, 0) + 1
            return False
        if count := self._kept_back.pop(line, 0):
            record.msg, record.args = f"{line} (and {count} times more in between)", ()
        if len(self._told) >= _MOST_LINES:
            self._told.clear()
            self._kept_back.clear()
        self._told[line] = record.created
        return True
