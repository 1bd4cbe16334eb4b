"""The form of log lines, their level, and warnings that repeat."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from controlplane.config.log_section import LogSection
from controlplane.log_output import (
    LogFields,
    LogOutput,
    LogRateLimiter,
    set_up_logging,
    update_logging,
)


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the log writes; the root logger is restored."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    set_up_logging(LogSection(format="json"))
    (output,) = [one for one in root.handlers if isinstance(one, LogOutput)]
    output.setStream(stream := io.StringIO())
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_json_lines_hold_fields_and_tracebacks(written):
    log = logging.getLogger("a.b")
    log.info(LogFields("request", {"path": "/x y", "status": 200, "ttft_ms": None}))
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("it failed: %s", "ü")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("at").endswith("Z")
    assert first == {
        "level": "info", "logger": "a.b", "message": "request", "path": "/x y", "status": 200,
        "ttft_ms": None,
    }  # fmt: skip
    assert (second["message"], second["level"]) == ("it failed: ü", "error")
    assert second["traceback"].endswith("ValueError: no\nway")


def test_text_lines_quote_values_that_a_space_would_split():
    fields = LogFields("request", {"path": "/a b", "id": 'x"y', "model": "m", "empty": "", "status": None})
    assert str(fields) == 'request path="/a b" id="x\\"y" model=m empty="" status=null'


def test_form_and_level_change_at_once(written):
    log = logging.getLogger("a")
    log.debug("unseen")
    update_logging(LogSection(level="warning"))
    log.info("unseen")
    log.warning("seen")
    assert written.getvalue().endswith("WARNING a: seen\n")
    assert written.getvalue().count("\n") == 1


def test_without_an_own_handler_nothing_changes():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    update_logging(LogSection(level="debug"))
    assert (root.handlers, root.level) == before


def test_an_interval_of_0_repeats_every_line(written):
    update_logging(LogSection(repeat_ms=0))
    for _ in range(3):
        logging.getLogger("a").warning("again")
    assert written.getvalue().count("again") == 3


def record(at: float, text: str, level: int = logging.WARNING, *, fault: bool = False) -> logging.LogRecord:
    error = ValueError(text)
    info = (ValueError, error, None) if fault else None
    found = logging.LogRecord("api", level, "", 0, "%s: down", (text,), info)
    found.created = at
    return found


def test_repeated_lines_are_dropped_and_counted():
    limiter, logged = LogRateLimiter(), []

    def say(at: float, text: str, level: int = logging.WARNING, *, fault: bool = False) -> None:
        if limiter.filter(one := record(at, text, level, fault=fault)):
            logged.append(one.getMessage())

    for at in (0.0, 0.1, 9.9):
        say(at, "a")
    say(5.0, "b")
    say(10.0, "a")
    say(10.1, "a")
    say(25.0, "b")
    assert logged == ["a: down", "b: down", "a: down (2 more since the last such line)", "b: down"]
    logged.clear()
    for _ in range(2):
        say(30.0, "z", fault=True)
        say(30.0, "i", logging.INFO)
    assert len(logged) == 4


def test_one_message_with_changing_values_is_bounded():
    limiter = LogRateLimiter()
    passed = [limiter.filter(record(30.0, str(number))) for number in range(1_000)]
    assert passed == [True] * 10 + [False] * 990
    late = record(41.0, "late")
    assert limiter.filter(late)
    assert late.getMessage() == "late: down (990 more since the last such line)"
    assert len(limiter._logged_at) <= 102
