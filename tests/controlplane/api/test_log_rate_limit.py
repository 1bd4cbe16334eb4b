"""A dead engine fails every request; the log is for what is new."""

import logging

from controlplane.api.errors import LogRateLimiter


def test_the_like_of_a_line_is_counted_and_told_with_the_next():
    seldom, told = LogRateLimiter(), []

    def say(at: float, text: str, *, fault: BaseException | None = None) -> None:
        info = None if fault is None else (type(fault), fault, None)
        record = logging.LogRecord("door", logging.WARNING, "", 0, "%s: down", (text,), info)
        record.created = at
        if seldom.filter(record):
            told.append(record.getMessage())

    for at in (0.0, 0.1, 9.9):
        say(at, "a")
    say(5.0, "b")
    say(10.0, "a")
    say(10.1, "a")
    say(25.0, "b")
    assert told == ["a: down", "b: down", "a: down (and 2 times more in between)", "b: down"]
    told.clear()
    for number in range(1_000):
        say(30.0, str(number))
    assert len(told) == 1_000
    assert len(seldom._told) <= 100
    for _ in range(2):
        say(30.0, "a defect", fault=ValueError("x"))
    assert told[1_000:] == ["a defect: down"] * 2
