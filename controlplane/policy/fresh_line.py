"""Who of those that have not started yet could start now? The smallest first, found by column.

In a full memory hundreds wait that fit nowhere, and each step asks for them all; so all but the few for whom
anything may happen are passed over in one operation. Of one that waits nothing changes but the time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np

from controlplane.core.clock import Instant
from controlplane.policy.columns import Columns
from controlplane.policy.draft import Draft
from controlplane.policy.progress import Progress

Key = tuple[float, int, str]
"""Size, arrival, id."""

_NEVER = Instant(1 << 62)
_TOKENS, _TO_COME, _URGENT_FROM = range(3)


class FreshLine:
    def __init__(self) -> None:
        self._listed: list[tuple[Key, Progress]] = []
        self._keys: dict[str, Key] = {}
        self._columns = Columns(3, np.int64)

    def __iter__(self) -> Iterator[tuple[Key, Progress]]:
        return iter(self._listed)

    def __getitem__(self, at: int) -> tuple[Key, Progress]:
        return self._listed[at]

    def add(self, progress: Progress, key: Key, urgent_from: Instant | None) -> None:
        """From `urgent_from` on it may take the memory of others; None for never."""
        at = self._place(key)
        self._listed.insert(at, (key, progress))
        self._keys[progress.request.id] = key
        urgent = _NEVER if urgent_from is None else urgent_from
        self._columns.put(at, (progress.tokens, progress.remaining(), urgent))

    def find(self, request_id: str) -> Progress | None:
        key = self._keys.get(request_id)
        return None if key is None else self._listed[self._place(key)][1]

    def drop(self, request_id: str) -> None:
        """Raises KeyError for one that is not in it."""
        at = self._place(self._keys.pop(request_id))
        del self._listed[at]
        self._columns.drop(at)

    def _place(self, key: Key) -> int:
        return bisect_left(self._listed, key, key=_key)

    def sort_anew(self, key_of: Callable[[Progress], Key]) -> None:
        keyed = [(key_of(progress), at, progress) for at, (_, progress) in enumerate(self._listed)]
        keyed.sort()
        self._listed = [(key, progress) for key, _, progress in keyed]
        self._keys = {progress.request.id: key for key, progress in self._listed}
        self._columns = self._columns.only([at for _, at, _ in keyed])

    def that_may_start(self, draft: Draft, first: int, in_vain: float) -> list[int]:
        """Places from `first` on: of those that fit and settle, and of the urgent that need less than
        `in_vain` blocks. For nobody else anything can be done, unless somebody gives way."""
        columns = self._columns.filled[:, first:]
        listed = (progress for _, progress in self._listed[first:])
        needs = columns[_TOKENS] // draft.view.per_block(listed) + 1
        fits = needs <= draft.free
        may = (columns[_URGENT_FROM] <= draft.view.now) & (fits | (needs < in_vain))
        if fits.any():
            may |= fits & draft.settle(needs, columns[_TO_COME])
        places: list[int] = (np.flatnonzero(may) + first).tolist()
        return places


def _key(entry: tuple[Key, Progress]) -> Key:
    return entry[0]
