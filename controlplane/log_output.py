"""Writes the log of the server on standard error: as text or JSON, with repeated warnings left out.

vLLM and transformers write lines of their own, whose level is set apart from ours.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from controlplane.config.log_section import LogSection

_TEXT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_PLAIN = re.compile(r"[\w./:@+-]+")
_MAX_KEYS = 100
# Of one message with changing values, such as ids.
_MOST_OF_TEMPLATE = 10


class LogFields:
    """A log message with fields: `message key=value ...` as text, members of the object as JSON."""

    def __init__(self, message: str, fields: Mapping[str, object]) -> None:
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.message, *(f"{name}={_plain(value)}" for name, value in self.fields.items())])


def _plain(value: object) -> str:
    """A value that no space or quote splits."""
    # By exact type, which is several times faster than isinstance with a union.
    kind = type(value)
    if kind is int or kind is float:
        return repr(value)
    if kind is str and _PLAIN.fullmatch(str(value)):
        return str(value)
    return "null" if value is None else json.dumps(value)


class JsonLines(logging.Formatter):
    """One JSON object per line; `at` is UTC with milliseconds."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, LogFields):
            line |= {"message": record.msg.message, **record.msg.fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class LogRateLimiter(logging.Filter):
    """Drops a warning or error that was logged less than `interval_s` ago.

    The next such line says how many were dropped. Of a message with changing values ten lines are logged in
    that time. Lines with a traceback always pass.
    """

    def __init__(self, interval_s: float = 10.0) -> None:
        super().__init__()
        self.interval_s = interval_s
        self._logged_at: dict[object, float] = {}
        self._counts: dict[object, int] = {}
        self._dropped: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        if record.exc_info is not None or record.levelno < logging.WARNING or not self.interval_s:
            return True
        line, template = record.getMessage(), (record.name, str(record.msg))
        for key, is_dropped in ((line, self._is_recent), (template, self._is_full)):
            if is_dropped(key, record.created):
                self._dropped[key] = self._dropped.get(key, 0) + 1
                return False
        if count := self._dropped.pop(line, 0) + self._dropped.pop(template, 0):
            record.msg, record.args = f"{line} ({count} more since the last such line)", ()
        if len(self._logged_at) >= _MAX_KEYS:
            self._logged_at.clear()
            self._counts.clear()
            self._dropped.clear()
        self._logged_at[line] = record.created
        if not self._is_recent(template, record.created):
            self._logged_at[template], self._counts[template] = record.created, 0
        self._counts[template] = self._counts.get(template, 0) + 1
        return True

    def _is_recent(self, key: object, now: float) -> bool:
        logged_at = self._logged_at.get(key)
        return logged_at is not None and now - logged_at < self.interval_s

    def _is_full(self, template: object, now: float) -> bool:
        return self._is_recent(template, now) and self._counts.get(template, 0) >= _MOST_OF_TEMPLATE


class LogOutput(logging.StreamHandler[Any]):
    """The handler of the root logger, as a section `log` states."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._limiter = LogRateLimiter()
        self.addFilter(self._limiter)

    def configure(self, section: LogSection) -> None:
        """Takes the form, the level and the interval of the section, from the next line on."""
        self.setFormatter(JsonLines() if section.format == "json" else _TEXT)
        self._limiter.interval_s = section.repeat_ms / 1_000
        logging.getLogger().setLevel(section.level.upper())


ENGINE_LEVELS = ("debug", "info", "warning", "error")
"""Levels of `set_engine_log_level`."""


def set_engine_log_level(level: str | None) -> None:
    """Sets the level of vLLM and transformers, in this process and in those that it starts.

    None takes that of VLLM_LOGGING_LEVEL, or else `warning`. Above `info` their progress bars are off. To be
    called before either is imported.
    """
    if level is None:
        stated = os.environ.get("VLLM_LOGGING_LEVEL", "warning").lower()
        level = stated if stated in ENGINE_LEVELS else "warning"
    os.environ["VLLM_LOGGING_LEVEL"] = level.upper()
    os.environ["TRANSFORMERS_VERBOSITY"] = level
    if level not in ("debug", "info"):
        os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("vllm", "transformers", "sentence_transformers"):
        logging.getLogger(name).setLevel(level.upper())


def set_up_logging(section: LogSection) -> None:
    """Replaces the root logger's handler of standard error by one that follows the section."""
    root, output = logging.getLogger(), LogOutput()
    output.configure(section)
    root.handlers[:] = [*(one for one in root.handlers if type(one) is not logging.StreamHandler), output]


def update_logging(section: LogSection) -> None:
    """Follows another section; does nothing where `set_up_logging` was not called."""
    for output in logging.getLogger().handlers:
        if isinstance(output, LogOutput):
            output.configure(section)
