"""The waiting queue: one list for each owner, sorted by rank, with a deadline for each entry's decision."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter

from controlplane.core.clock import Instant
from controlplane.core.pool_view import Queue, Waiting
from controlplane.core.request import Owner

_by_rank = attrgetter("rank")


class WaitingQueue:
    """Holds all waiting requests; sorted insertion spares each cycle a sort.

    An entry is undecided when it is new or when its `until` has passed; a cycle decides the undecided
    entries.
    """

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
        """The entries of `owner`, by rank."""
        return self._queues[owner]

    def cap_footprints(self, owner: Owner, max_bytes: int) -> list[Waiting]:
        """Cuts the footprints of the waiting requests of `owner` to `max_bytes`; their order stays.

        Returns the entries that replace those that were larger.
        """
        queue, replaced = self._queues[owner], list[Waiting]()
        for index, waiting in enumerate(queue):
            footprint = waiting.footprint
            if max(footprint.base, footprint.worst) <= max_bytes:
                continue
            cut = replace(
                footprint, base=min(footprint.base, max_bytes), worst=min(footprint.worst, max_bytes)
            )
            queue[index] = capped = replace(waiting, footprint=cut)
            self._entries[waiting.request.id] = capped
            if waiting.request.id in self._undecided:
                self._undecided[waiting.request.id] = capped
            replaced.append(capped)
        return replaced

    def add(self, waiting: Waiting) -> None:
        """Inserts an entry by its rank; it is undecided."""
        request_id = waiting.request.id
        insort(self._queues[waiting.request.kind.owner], waiting, key=_by_rank)
        self._entries[request_id] = waiting
        self._undecided[request_id] = waiting
        if waiting.until is not None:
            heappush(self._bounds, (waiting.until, request_id))

    def remove(self, request_id: str) -> None:
        """Removes an entry; does nothing if the request does not wait."""
        waiting = self._entries.pop(request_id, None)
        if waiting is None:
            return
        queue = self._queues[waiting.request.kind.owner]
        del queue[bisect_left(queue, waiting.rank, key=_by_rank)]
        self._undecided.pop(request_id, None)

    def queue_including(self, waiting: Waiting) -> Queue:
        """A queue in which only `waiting` is undecided, for a dry run; it may be hypothetical."""
        queue = [*self._queues[waiting.request.kind.owner]]
        if waiting.request.id not in self._entries:
            insort(queue, waiting, key=_by_rank)
        return Queue(tuple(queue), [waiting])

    def take_undecided(self, now: Instant) -> Mapping[Owner, Queue]:
        """Returns the queues with the entries that this cycle must decide, and marks these as decided."""
        while (bound := self.next_bound()) is not None and bound <= now:
            _, request_id = heappop(self._bounds)
            self._undecided[request_id] = self._entries[request_id]
        undecided, self._undecided = self._undecided, {}
        return {
            owner: Queue(tuple(queue), [w for w in undecided.values() if w.request.kind.owner is owner])
            for owner, queue in self._queues.items()
        }

    def next_bound(self) -> Instant | None:
        """The earliest `until` of all entries; None if there is none."""
        while self._bounds and self._bounds[0][1] not in self._entries:
            heappop(self._bounds)
        return self._bounds[0][0] if self._bounds else None
