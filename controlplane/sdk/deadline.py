"""One deadline for all calls of a block: each call sends what remains of it and waits no longer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

import httpx

from controlplane.api.protocol.requests import MAX_OBJECTIVE_MS
from controlplane.sdk.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class CallDeadline:
    """A point in time, in seconds of `time.monotonic`; `total_ms` is how long it was when it was set."""

    at_s: float
    total_ms: float

    def remaining_s(self) -> float:
        """Seconds that remain; 0 or less once the deadline has passed."""
        return self.at_s - monotonic()

    def exceeded(self, doing: str) -> DeadlineExceeded:
        """The exception for a call that the deadline ends; `doing` says where."""
        return DeadlineExceeded(f"{doing}: the deadline of {self.total_ms:g} ms has passed")

    def check(self, doing: str) -> float:
        """Seconds that remain. Raises DeadlineExceeded if none do."""
        remaining_s = self.remaining_s()
        if remaining_s <= 0:
            raise self.exceeded(doing)
        return remaining_s


# A socket's time limit is rounded to milliseconds.
_ROUNDING_S = 0.002

_CURRENT: ContextVar[CallDeadline | None] = ContextVar("tandem_deadline", default=None)


@contextmanager
def deadline(*, ms: float) -> Iterator[CallDeadline]:
    """Bounds all calls that the block makes, from all clients, by one deadline.

    Each call sends what remains as its end-to-end objective (`x-slo-e2e-ms`), so that the server can order it
    or reject it early, and waits no longer than that. A call after the deadline raises DeadlineExceeded and
    sends nothing. In nested blocks the earlier deadline applies. The deadline is a context variable: tasks
    and `asyncio.to_thread` inherit it, other threads do not. A blocking client waits at most what remained
    when the call was sent for each part of the response; an asyncio client is interrupted at the deadline.

    Raises ValueError unless `ms` is above 0 and at most one day.
    """
    if not 0 < ms <= MAX_OBJECTIVE_MS:
        raise ValueError(
            f"ms={ms}: should be milliseconds above 0 and at most {MAX_OBJECTIVE_MS:.0f}; change it"
        )
    found, outer = CallDeadline(monotonic() + ms / 1000, ms), _CURRENT.get()
    token = _CURRENT.set(found if outer is None or found.at_s < outer.at_s else outer)
    try:
        yield found
    finally:
        _CURRENT.reset(token)


def current_deadline() -> CallDeadline | None:
    """The deadline of the block that encloses the caller, if any."""
    return _CURRENT.get()


def ended_by(deadline: CallDeadline | None, error: Exception, doing: str) -> DeadlineExceeded | None:
    """The exception for a transport error that is the deadline's time limit; None for any other error."""
    if deadline is None or not isinstance(error, httpx.TimeoutException):
        return None
    return deadline.exceeded(doing) if deadline.remaining_s() <= _ROUNDING_S else None


@asynccontextmanager
async def time_limit(deadline: CallDeadline | None, doing: str) -> AsyncIterator[None]:
    """Cancels its block at the deadline, if there is one, and then raises DeadlineExceeded."""
    if deadline is None:
        yield
        return
    limit = asyncio.timeout(deadline.check(doing))
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise deadline.exceeded(doing) from error
        raise
