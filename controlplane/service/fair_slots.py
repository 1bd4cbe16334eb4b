"""Runs costly work in a bounded number of slots that tenants take in turn."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


class FairSlots:
    """At most `slots` pieces of work run at once; the tenants that wait are served in turn (round robin).

    One tenant holds all slots but one at most, so that one slow piece of work does not delay another tenant.
    """

    def __init__(self, slots: int) -> None:
        self._slots = self._free = slots
        self._held: Counter[str] = Counter()
        # Tenants in the order of their turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Runs `work` in a slot of `tenant`.

        Work that has begun keeps its slot to its end even if the caller is cancelled: a thread cannot be
        cancelled, and clients that leave must not multiply the work.
        """
        await self._take(tenant)
        running = asyncio.ensure_future(work())
        running.add_done_callback(lambda done: self._finished(tenant, done))
        try:
            return await asyncio.shield(running)
        finally:
            # An exception refers to this frame, and the task to the exception. The cycle would keep what was
            # refused until the next garbage collection.
            del running

    def resize(self, slots: int) -> None:
        """Sets the number of slots; work that runs beyond a smaller number keeps its slot to its end."""
        self._free += slots - self._slots
        self._slots = slots
        for _ in range(self._free):
            self._start_waiting()

    async def _take(self, tenant: str) -> None:
        if self._may_start(tenant) and tenant not in self._waiting:
            self._start(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:
                # The slot was given in the iteration of the event loop in which the caller was cancelled.
                self._give_back(tenant)
            raise

    def _leave(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(tenant, ())
        if turn in turns:
            self._waiting[tenant].remove(turn)
        if not turns:
            self._waiting.pop(tenant, None)

    def _may_start(self, tenant: str) -> bool:
        return self._free > 0 and self._held[tenant] < max(1, self._slots - 1)

    def _start(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _finished(self, tenant: str, done: "asyncio.Future[Result]") -> None:
        if not done.cancelled():
            # Marks the exception as retrieved, since a cancelled caller never retrieves it.
            done.exception()
        self._give_back(tenant)

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Gives the free slots to the tenants that wait, each at most one."""
        for name, turns in list(self._waiting.items()):
            # Callers that were cancelled in this iteration of the event loop have not left yet.
            while turns and turns[0].cancelled():
                turns.popleft()
            if not turns:
                del self._waiting[name]
            elif self._may_start(name):
                self._start(name)
                turns.popleft().set_result(None)
                # The tenant's next turn comes after those of all others that wait.
                del self._waiting[name]
                if turns:
                    self._waiting[name] = turns
