"""Handles signals while the server's modules are imported and the memory is planned.

Both take seconds, in which the server's event loop does not run yet, and Python's own handlers would end the
process with the signal or with a traceback. Imports nothing that takes time.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger("tandem")

ENDING = (signal.SIGINT, signal.SIGTERM)
RELOADING = (signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def early_signals() -> Iterator[list[int]]:
    """Yields the list of received `RELOADING` signals; while the block runs, `ENDING` ends with status 0.

    Must be used before an engine starts: the process ends at once and cleans nothing up.
    """
    received: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        received.append(number)

    actions = dict.fromkeys(ENDING, _end) | dict.fromkeys(RELOADING, keep)
    former = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    # Not by an exception: a module that is being imported may swallow it.
    try:
        _log.info("the start was ended by a signal")
    finally:
        os._exit(0)
