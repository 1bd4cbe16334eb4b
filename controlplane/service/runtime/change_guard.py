"""Watches each class's attainment after a configuration change, and undoes a change that costs too much.

Attainment is the share of ended requests that met every objective; a rejected request is a miss, and one
whose client left does not count. It is compared with that of the same length of time before the change. A
drop is undone at once if it exceeds three standard errors, which few requests do by chance, and at the end of
the time whatever it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt

from controlplane.core.clock import Instant, seconds, to_seconds
from controlplane.service.attainment_windows import LONGEST, Attained, AttainmentWindows, Counts, difference

_log = logging.getLogger(__name__)

LONGEST_GUARD_S = to_seconds(LONGEST)
"""The counts before the change reach back so far."""
FEWEST_REQUESTS = 20
"""A class with fewer of them before or since the change is not judged."""
_STANDARD_ERRORS = 3.0
_CHECKS = 60
_MOST_NAMED = 10


class GuardState(Enum):
    """How far a guard is."""

    WATCHING = "watching"
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"
    EXPIRED = "expired"
    """The time of a temporary change is over; the version before it is in force."""
    SUPERSEDED = "superseded"
    """Another change came; nothing is undone, since that would undo the other change too."""
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class ChangeGuard:
    """Watches one change for `seconds`; `undo` puts the version before it in force again.

    `on_end` is called once with the guard that has ended, after the undoing; a service that stops ends none.

    `classes` are the names of the version's classes. A class may lose `drop` percentage points, with None any
    number. A temporary change is undone at the end in any case.
    """

    version: int
    seconds: float
    drop: float | None
    classes: Collection[str]
    history: AttainmentWindows
    now: Callable[[], Instant]
    undo: Callable[[str], Awaitable[object]]
    is_temporary: bool = False
    on_end: Callable[["ChangeGuard"], None] = lambda guard: None
    state: GuardState = field(init=False, default=GuardState.WATCHING)
    reason: str = field(init=False, default="")
    _begin: Counts = field(init=False)
    _before: Counts = field(init=False)
    _last: Counts | None = field(init=False, default=None)
    _task: asyncio.Task[None] | None = field(init=False, default=None)

    def start(self) -> None:
        """Begins to watch."""
        now = self.now()
        self._begin = self.history.now()
        earlier = self.history.at(Instant(now - seconds(self.seconds)))
        self._before = difference(self._begin, earlier)
        self._task = asyncio.create_task(self._watch())

    def supersede(self) -> None:
        """Ends the guard because another change was applied."""
        if self.state is GuardState.WATCHING:
            self._end(GuardState.SUPERSEDED, "another change was applied")
            self.stop()
            self.on_end(self)

    def stop(self) -> None:
        """Ends the task."""
        if self._task is not None:
            self._task.cancel()

    def to_json(self) -> dict[str, object]:
        """State and attainment before and since the change, up to the end of the guard, by class."""
        since = self._since()
        return {
            "version": self.version,
            "seconds": self.seconds,
            "drop": self.drop,
            "is_temporary": self.is_temporary,
            "state": self.state.value,
            "reason": self.reason,
            "before": _shown(self._before),
            "since": _shown(since),
            "fewest_requests": FEWEST_REQUESTS,
            "not_judged": [] if self.drop is None else list(self._not_judged(since)),
        }

    def _since(self) -> Counts:
        return difference(self.history.now() if self._last is None else self._last, self._begin)

    def _not_judged(self, since: Counts) -> dict[str, tuple[int, int]]:
        """The classes with too few requests before or since the change, with both numbers."""
        none = Attained()
        ended = {
            name: (self._before.get(name, none).ended, since.get(name, none).ended) for name in self.classes
        }
        return {name: both for name, both in ended.items() if min(both) < FEWEST_REQUESTS}

    def _verdict(self) -> str:
        """What is known at the end if no class lost too much: which classes were not judged, if any."""
        few = self._not_judged(self._since())
        kept = f"lost more than {self.drop:g} points"
        if not few:
            return f"no class {kept}"
        named = [f"{name} ({was:,} before, {since:,} since)" for name, (was, since) in few.items()]
        if len(named) > _MOST_NAMED:
            named[_MOST_NAMED:] = [f"{len(named) - _MOST_NAMED} more"]
        is_any_judged = len(few) < len(self.classes)
        judged = f"no judged class {kept}; not judged" if is_any_judged else "no class was judged"
        return (
            f"{judged}, with fewer than {FEWEST_REQUESTS} requests before or since the change: "
            + ", ".join(named)
        )

    async def _watch(self) -> None:
        try:
            await self._watched()
        except Exception as error:
            _log.exception("the guard of version %d stopped", self.version)
            if self.state is GuardState.WATCHING:
                self.state = GuardState.FAILED
                self.reason = f"the guard stopped: {error!r}; nothing is undone"
                self.on_end(self)

    async def _watched(self) -> None:
        for check in range(1, _CHECKS + 1):
            await asyncio.sleep(self.seconds / _CHECKS)
            if (lost := self._lost(is_last=check == _CHECKS)) is not None:
                await self._undo(GuardState.ROLLED_BACK, lost)
                return
        verdict = [] if self.drop is None else [self._verdict()]
        if self.is_temporary:
            over = f"the change was for {self.seconds:g} s"
            await self._undo(GuardState.EXPIRED, "; ".join([over, *verdict]))
        else:
            self._end(GuardState.KEPT, "; ".join(verdict))
            self.on_end(self)

    async def _undo(self, state: GuardState, reason: str) -> None:
        # Set first, since the change that undoes this one would supersede the guard.
        self._end(state, reason)
        try:
            await self.undo(reason)
        except Exception as error:
            self._end(GuardState.FAILED, f"{reason}; undoing the change failed: {error}")
        self.on_end(self)

    def _lost(self, *, is_last: bool) -> str | None:
        """The class that lost too much; None if there is none."""
        if self.drop is None:
            return None
        since = difference(self.history.now(), self._begin)
        for name, before in sorted(self._before.items()):
            after = since.get(name, Attained())
            if min(before.ended, after.ended) < FEWEST_REQUESTS:
                continue
            was, is_now = before.met / before.ended, after.met / after.ended
            lost = 100 * (was - is_now)
            if lost > self.drop and (
                is_last or was - is_now > _STANDARD_ERRORS * _standard_error(before, after)
            ):
                return (
                    f"class {name} lost {lost:.1f} points: {100 * is_now:.1f} % of {after.ended} requests "
                    f"attained after the change, and {100 * was:.1f} % of {before.ended} before"
                )
        return None

    def _end(self, state: GuardState, reason: str) -> None:
        # Requests that end later may be those of another version.
        self.state, self.reason, self._last = state, reason, self.history.now()


def _shown(counts: Counts) -> dict[str, object]:
    """Attainment in percent, and the number of requests."""
    return {
        name: {"percent": None if each.share is None else round(100 * each.share, 2), "requests": each.ended}
        for name, each in counts.items()
    }


def _standard_error(one: Attained, other: Attained) -> float:
    """Of the difference of two shares, by their common share."""
    share = (one.met + other.met) / (one.ended + other.ended)
    return sqrt(share * (1 - share) * (1 / one.ended + 1 / other.ended))
