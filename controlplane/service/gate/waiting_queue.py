"""Who has no memory yet? One queue an owner, kept sorted by rank; each entry bounded by its `until`."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from controlplane.core.clock import Instant
from controlplane.core.request import Owner
from controlplane.core.view import Queue, Waiting


class WaitingQueue:
    """Sole owner of what waits. Sorted insertion keeps a cycle from sorting again."""

    def __init__(self) -> None:
        self._queues: dict[Owner, list[Waiting]] = {owner: [] for owner in Owner}
        self._undecided: dict[str, Waiting] = {}
        self._entries: dict[str, Waiting] = {}
        self._bounds: list[tuple[Instant, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._entries.values()))

    def queued(self, owner: Owner) -> Sequence[Waiting]:
        return self._queues[owner]

    def cap_footprints(self, owner: Owner, most_bytes: int) -> None:
        """Footprints of all that wait for the owner, cut to `max_bytes`. Their order stays."""
        queue = self._queues[owner]
        for place, waiting in enumerate(queue):
            footprint = waiting.footprint
            if max(footprint.base, footprint.worst) <= most_bytes:
                continue
            cut = replace(
                footprint, base=min(footprint.base, most_bytes), worst=min(footprint.worst, most_bytes)
            )
            queue[place] = refitted = replace(waiting, footprint=cut)
            self._entries[waiting.request.id] = refitted
            if waiting.request.id in self._undecided:
                self._undecided[waiting.request.id] = refitted

    def count(self, owner: Owner) -> int:
        return len(self._queues[owner])

    def add(self, waiting: Waiting) -> None:
        request_id = waiting.request.id
        insort(self._queues[waiting.request.kind.owner], waiting, key=_rank)
        self._entries[request_id] = waiting
        self._undecided[request_id] = waiting
        if waiting.until is not None:
            heappush(self._bounds, (waiting.until, request_id))

    def remove(self, request_id: str) -> None:
        """Does nothing if the request does not wait (any more)."""
        waiting = self._entries.pop(request_id, None)
        if waiting is None:
            return
        queue = self._queues[waiting.request.kind.owner]
        del queue[bisect_left(queue, waiting.rank, key=_rank)]
        self._undecided.pop(request_id, None)

    def queue_including(self, waiting: Waiting) -> Queue:
        """For a cycle that decides this one alone, which may wait here or not."""
        queue = [*self._queues[waiting.request.kind.owner]]
        if waiting.request.id not in self._entries:
            insort(queue, waiting, key=_rank)
        return Queue(tuple(queue), [waiting])

    def queues(self, now: Instant) -> Mapping[Owner, Queue]:
        """For one cycle, which decides all that it is given."""
        while (bound := self.next_bound()) is not None and bound <= now:
            _, request_id = heappop(self._bounds)
            self._undecided[request_id] = self._entries[request_id]
        undecided, self._undecided = self._undecided, {}
        return {
            owner: Queue(tuple(queue), [w for w in undecided.values() if w.request.kind.owner is owner])
            for owner, queue in self._queues.items()
        }

    def next_bound(self) -> Instant | None:
        """When the next entry's time is up."""
        while self._bounds and self._bounds[0][1] not in self._entries:
            heappop(self._bounds)
        return self._bounds[0][0] if self._bounds else None


def _rank(waiting: Waiting) -> tuple[int, int, str]:
    return waiting.rank
