"""The log rate limiter: repeated lines are dropped and counted, tracebacks always pass."""

import logging

from controlplane.api.errors import LogRateLimiter


def test_repeated_lines_are_dropped_and_counted():
    limiter, logged = LogRateLimiter(), []

    def say(at: float, text: str, *, fault: BaseException | None = None) -> None:
        info = None if fault is None else (type(fault), fault, None)
        record = logging.LogRecord("api", logging.WARNING, "", 0, "%s: down", (text,), info)
        record.created = at
        if limiter.filter(record):
            logged.append(record.getMessage())

    for at in (0.0, 0.1, 9.9):
        say(at, "a")
    say(5.0, "b")
    say(10.0, "a")
    say(10.1, "a")
    say(25.0, "b")
    assert logged == ["a: down", "b: down", "a: down (2 more since the last such line)", "b: down"]
    logged.clear()
    for number in range(1_000):
        say(30.0, str(number))
    assert len(logged) == 1_000
    assert len(limiter._logged_at) <= 100
    for _ in range(2):
        say(30.0, "a defect", fault=ValueError("x"))
    assert logged[1_000:] == ["a defect: down"] * 2
