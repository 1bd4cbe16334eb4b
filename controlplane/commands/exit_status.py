"""Exit statuses of `tandem`. docs/command-line.md lists them, generated from here."""

from collections.abc import Mapping
from enum import IntEnum


class ExitStatus(IntEnum):
    """The statuses of all commands."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_ATTAINED = 3
    INTERRUPTED = 130


MEANINGS: Mapping[ExitStatus, str] = {
    ExitStatus.DONE: "The command did what it was asked to do; a regression check found nothing.",
    ExitStatus.FAILED: "`serve`: the service failed. `bench compare`: B is worse. `bench gate`: a bound is "
    "broken. `bench run`: a server did not start, or failed. "
    "`diff`: there is a difference. `apply`, `rollback`, `explain`, `drain`, `top`: the server was not "
    "reached or failed, or a guard undid the change.",
    ExitStatus.BAD_INPUT: "An option, a file or the configuration is invalid, a package is missing, or a "
    "file exists and may not be overwritten; `diff`: the server was not reached. Nothing was started or "
    "written.",
    ExitStatus.NOT_ATTAINED: "The answer is no: at the lowest rate that `capacity` tried, a class missed its "
    "objectives too often, no number of boxes serves the demand of `fleet plan` in time, `replay` or `tune` "
    "does not reproduce its log, or `tune` found nothing better.",
    ExitStatus.INTERRUPTED: "Interrupted from the keyboard, except `serve`, which drains and exits with 0.",
}
