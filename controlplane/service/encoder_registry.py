"""The workers of embedding models and rerankers: those that new requests go to, and those that are leaving.

A request is bound to one worker from its tokenization to its answer, since its token ids are those of that
worker's model. A worker that was replaced or removed is leaving until no request is bound to it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from controlplane.core.ports import Embedder, Reranker


class WorkerCounts(NamedTuple):
    """Counts of all workers since the start of the service."""

    stalls: int = 0
    restarts: int = 0
    out_of_memory: int = 0


class EncoderRegistry(Mapping[str, Embedder]):
    """As a mapping: the workers that new requests go to, by the name of their model; rerankers are last.

    It changes while the service runs, so its readers keep it and not a copy. `on_added` is called with each
    worker that is added later, in the step of the event loop that adds it.
    """

    def __init__(self, embedders: Iterable[Embedder], rerankers: Iterable[Reranker] = ()) -> None:
        self.embedders: dict[str, Embedder] = {each.model: each for each in embedders}
        self.rerankers: dict[str, Reranker] = {each.model: each for each in rerankers}
        self.leaving: list[Embedder] = []
        self.on_added: list[Callable[[Embedder], None]] = []
        self._bound: Counter[Embedder] = Counter()
        self._unbound = asyncio.Event()
        self._counts_of_stopped = WorkerCounts()

    def __getitem__(self, model: str) -> Embedder:
        found = self.embedders.get(model)
        return self.rerankers[model] if found is None else found

    def __iter__(self) -> Iterator[str]:
        yield from self.embedders
        yield from self.rerankers

    def __len__(self) -> int:
        return len(self.embedders) + len(self.rerankers)

    @property
    def running(self) -> list[Embedder]:
        """All workers that may compute, the leaving ones last."""
        return [*self.embedders.values(), *self.rerankers.values(), *self.leaving]

    @property
    def counts(self) -> WorkerCounts:
        """Counts of all workers, stopped ones included."""
        totals = [self._counts_of_stopped, *map(_counts_of, self.running)]
        return WorkerCounts(*map(sum, zip(*totals, strict=True)))

    @contextmanager
    def bound(self, worker: Embedder) -> Iterator[None]:
        """Binds a request to a worker for the time of the block."""
        self._bound[worker] += 1
        try:
            yield
        finally:
            self._bound[worker] -= 1
            if not self._bound[worker]:
                del self._bound[worker]
                self._unbound.set()

    def bound_requests(self, worker: Embedder) -> int:
        """How many requests are bound to a worker."""
        return self._bound[worker]

    async def until_unbound(self, worker: Embedder) -> None:
        """Waits until no request is bound to a worker."""
        while self._bound[worker]:
            self._unbound.clear()
            await self._unbound.wait()

    def switch(
        self, embedders: Mapping[str, Embedder], rerankers: Mapping[str, Reranker], removed: Collection[str]
    ) -> list[Embedder]:
        """Sends new requests to these workers, replacing any of the same name, and none to the removed ones.

        Returns the workers that are leaving from now on.
        """
        # A model may change its kind.
        gone = [self[name] for name in (*removed, *embedders, *rerankers) if name in self]
        for name in (*removed, *embedders):
            self.rerankers.pop(name, None)
        for name in (*removed, *rerankers):
            self.embedders.pop(name, None)
        self.embedders.update(embedders)
        self.rerankers.update(rerankers)
        self.leaving += gone
        for worker in (*embedders.values(), *rerankers.values()):
            for listener in self.on_added:
                listener(worker)
        return gone

    def stopped(self, worker: Embedder) -> None:
        """Forgets a leaving worker but for its counts."""
        self._counts_of_stopped = WorkerCounts(
            *(a + b for a, b in zip(self._counts_of_stopped, _counts_of(worker), strict=True))
        )
        self.leaving.remove(worker)


def _counts_of(worker: Embedder) -> WorkerCounts:
    return WorkerCounts(worker.stall_count, worker.restarts, worker.out_of_memory)
