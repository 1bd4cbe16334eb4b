"""Sorted columnar index of waiting requests, to find those that could start with one vector operation.

With a full memory hundreds of requests wait that fit nowhere, and every step tests them all. While a request
waits, only the time changes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np

from controlplane.core.clock import Instant
from controlplane.core.memory_ledger import Floats
from controlplane.policy.engine.column_store import Bools, ColumnStore, Ints
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.plan_builder import PlanBuilder
from controlplane.policy.engine.request_state import RequestState

Key = TypeVar("Key", bound=tuple[float | str, ...])
"""A sort key that ends in the request id."""

NEVER = Instant(1 << 62)
_TOKENS, _TO_COME, _DUE, _GUESS = range(4)


class WaitingIndex(Generic[Key]):
    """Waiting requests sorted by a key that ends in the request id."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._listed: list[RequestState] = []
        self._entries: dict[str, tuple[Key, RequestState]] = {}
        self._columns = ColumnStore(4, np.int64)
        self._weights = ColumnStore(1, np.float64)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[Key, RequestState]]:
        return zip(self._keys, self._listed, strict=True)

    def __getitem__(self, index: int) -> tuple[Key, RequestState]:
        return self._keys[index], self._listed[index]

    def add(self, state: RequestState, key: Key, to_come: int, due: Instant | None) -> None:
        """Inserts a request; the caller defines what is due at `due` (None: never)."""
        index = self.place(key)
        self._keys.insert(index, key)
        self._listed.insert(index, state)
        self._entries[state.request.id] = (key, state)
        when = NEVER if due is None else due
        self._columns.put(index, (state.tokens, to_come, when, state.is_guess))
        self._weights.put(index, (state.weight,))

    def find(self, request_id: str) -> RequestState | None:
        """The request with this id, or None."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry[1]

    def drop(self, request_id: str) -> None:
        """Removes the request. Raises KeyError if it is not in the index."""
        key, _ = self._entries.pop(request_id)
        index = self.place(key)
        del self._keys[index], self._listed[index]
        self._columns.drop(index)
        self._weights.drop(index)

    def place(self, key: Key) -> int:
        """Number of requests before `key`."""
        return bisect_left(self._keys, key)

    def resort(self, key_of: Callable[[RequestState], Key]) -> None:
        """Sorts all requests by new keys."""
        keyed = sorted((key_of(state), index) for index, state in enumerate(self._listed))
        order = [index for _, index in keyed]
        self._keys = [key for key, _ in keyed]
        self._listed = [self._listed[index] for index in order]
        self._entries = {state.request.id: (key, state) for key, state in self}
        self._columns, self._weights = self._columns.select(order), self._weights.select(order)

    @property
    def tokens(self) -> Ints:
        """Tokens of each request, int64 [n]."""
        return self._columns.column(_TOKENS)

    @property
    def due(self) -> Ints:
        """Due time of each request, int64 [n]; `NEVER` without one."""
        return self._columns.column(_DUE)

    @property
    def weight(self) -> Floats:
        """Weight of the class of each request, float64 [n]."""
        return self._weights.column(0)

    @property
    def is_guess(self) -> Bools:
        """Whether each request has no forecast but max_tokens, bool [n]."""
        return np.not_equal(self._columns.column(_GUESS), 0)

    def needs(self, view: EngineView) -> Ints:
        """`EngineView.need` of each request, int64 [n]."""
        return view.needs(self.tokens, self._listed)

    def may_start(self, builder: PlanBuilder, needs: Ints, is_pressed: Bools, unobtainable: int = 0) -> Bools:
        """Whether each request might start, bool [n].

        True for requests that fit for the horizon. Of the pressed ones also for those that fit only for now
        or need fewer than `unobtainable` blocks. All other waiting requests need a preemption to start.
        """
        fits = needs <= builder.free
        may: Bools = is_pressed & (fits | (needs < unobtainable))
        if np.count_nonzero(fits):
            may |= fits & builder.many_fit_for_horizon(needs, self._columns.column(_TO_COME))
        return may
