"""Evicts forwarded requests that their engine has not started within `admission.max_wait_ms`.

An engine with Tandem's scheduler starts requests in its own order, late ones last. Under overload that lasts,
requests that the gate forwarded on too optimistic an estimate would wait in the engine until the load ends.
"""

import asyncio
from collections import deque
from heapq import heappop, heappush

from controlplane.core.clock import Clock, Duration, Instant, after, to_seconds
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.ticket import Ticket


class StartTimeouts:
    """The forwarded requests by the time at which they are due, with one timer for the first.

    A request that ends leaves its id here until its time, `max_wait` after its arrival.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock, max_wait: Duration) -> None:
        self.max_wait = max_wait
        self._dispatcher = dispatcher
        self._clock = clock
        self._forwarded: list[tuple[Instant, str]] = []
        self._timer: asyncio.TimerHandle | None = None

    def forwarded(self, ticket: Ticket) -> None:
        """Bounds the time until the engine starts the request."""
        due = (after(ticket.request.arrival, self.max_wait), ticket.request.id)
        heappush(self._forwarded, due)
        # A request that waited at the gate, or came after `max_wait` fell, is due before others.
        if self._forwarded[0] is due:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = to_seconds(Duration(self._forwarded[0][0]))
        self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        now, self._timer = self._clock.now(), None
        due: deque[tuple[Instant, str]] = deque()
        while self._forwarded and self._forwarded[0][0] <= now:
            due.append(heappop(self._forwarded))
        try:
            while due:
                self._dispatcher.evict_unstarted(due.popleft()[1])
        finally:
            # After an exception, which the event loop reports, the others follow in its next turn.
            for other in due:
                heappush(self._forwarded, other)
            if self._forwarded:
                self._set_timer()
