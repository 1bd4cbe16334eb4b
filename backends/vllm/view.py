"""What does vLLM's scheduler hold right now, in the policies' terms?

Of each running request: tokens that appeared since the last look, blocks held, and blocks that this step
will ask for. A request's blocks follow from its computed tokens; what the prefix cache
shares is counted with each of its readers, so `held` is what it can be relied on to give back only
where nothing is shared.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.vllm.board import Column
from backends.vllm.metadata import Served
from controlplane.core.clock import Instant
from controlplane.policy.progress import Progress, stamp_all

Counts = npt.NDArray[np.int64]
_KEY, _TOKENS, _COMPUTED, _HELD, _ROOM = range(5)


def stamp(request: Any, now: Instant) -> None:
    progress: Progress = request.tandem
    if new := request.num_tokens - progress.tokens:
        progress.stamp(now, new)


class Runners:
    """Those that run, by column, kept from step to step: nearly all time of a look is waiting for memory, so
    no object is touched that cannot have changed. `listed` is what we know of each, in vLLM's order.

    `runs_ahead` if more is computed than there is (drafts, or a step in flight), `takes_back` if computed
    tokens may be taken back while a request runs (drafts, or a transfer that failed)."""

    def __init__(self, block_tokens: int, *, has_packed: bool, runs_ahead: bool, takes_back: bool) -> None:
        self._block_tokens = block_tokens
        self._has_packed = has_packed
        self._runs_ahead = runs_ahead
        self._takes_back = takes_back
        self._came = 0
        self._numbers: dict[Served, int] = {}
        self._gone: list[int] = []
        self._requests: list[Any] = []
        self._ids: list[list[int]] = []
        # In the order of `listed`: a number that rises with each that comes.
        self._order: list[int] = []
        # Key, tokens when last stamped, computed tokens, blocks, and the tokens that these can hold.
        self._all_columns = np.zeros((5, 64), np.int64)
        self.listed: list[Served] = []

    def left(self, progress: Served) -> None:
        """It runs no more."""
        if (number := self._numbers.pop(progress, None)) is not None:
            self._gone.append(number)

    def follow(self, running: list[Any]) -> int:
        """How many stayed. Newcomers are always last."""
        if running == self._requests:
            return len(running)
        for number in self._gone:
            self._drop(bisect_left(self._order, number))
        self._gone.clear()
        stayed = len(self._requests)
        self._take(running[stayed:])
        if running == self._requests:
            return stayed
        # Somebody left in a way that is unknown here.
        for kept in (self._numbers, self._order, self._requests, self._ids, self.listed):
            kept.clear()
        self._take(running)
        return 0

    def _drop(self, at: int) -> None:
        count = len(self._order)
        del self._order[at], self._requests[at], self._ids[at], self.listed[at]
        self._all_columns[:, at : count - 1] = self._all_columns[:, at + 1 : count]

    def _take(self, newcomers: list[Any]) -> None:
        for request in newcomers:
            at, progress = len(self._order), request.tandem
            if at == self._all_columns.shape[1]:
                self._all_columns = np.hstack((self._all_columns, np.zeros_like(self._all_columns)))
            self._requests.append(request)
            # Never bound anew by vLLM, whose scheduler reads it too; to ask for its length through the
            # request takes three times as long.
            self._ids.append(request._all_token_ids)
            self.listed.append(progress)
            self._order.append(self._came)
            self._numbers[progress] = self._came
            self._came += 1
            self._all_columns.view(np.uint64)[_KEY, at] = progress.key
            self._all_columns[_TOKENS, at] = progress.tokens
            self._read_computed(at)

    @property
    def _columns(self) -> Counts:
        return self._all_columns[:, : len(self._order)]

    def stamp(self, running: list[Any], now: Instant) -> None:
        self.follow(running)
        tokens = list(map(len, self._ids))
        stamp_all(self.listed, tokens, now)
        self._columns[_TOKENS] = tokens

    def growth(self, max_step_tokens: int) -> int:
        """Blocks that this step asks for, and brings what each holds up to date. After `stamp`."""
        if self._takes_back or self._has_packed:
            self._read_computed(0)
        columns, growth = self._columns, 0
        known = columns[_TOKENS]
        if self._runs_ahead:
            known = known + [len(one.spec_token_ids) + one.num_output_placeholders for one in self._requests]
        for at in np.flatnonzero(known > columns[_ROOM]).tolist():
            most = min(int(known[at]), int(columns[_COMPUTED, at]) + max_step_tokens)
            growth += -(-most // self._size(at)) - self.listed[at].held
        return growth

    def scheduled(self, running: list[Any], tokens: Mapping[str, int], total: int) -> None:
        """A step computes so many tokens of each, and in all. Call right after it was scheduled."""
        stayed = self.follow(running)
        columns = self._columns
        theirs = sum(tokens.get(request.request_id, 0) for request in self._requests[stayed:])
        if len(tokens) == len(running) and total - theirs == stayed:
            # Everybody else got one.
            columns[_COMPUTED, :stayed] += 1
            over = columns[_COMPUTED, :stayed] > columns[_ROOM, :stayed]
            for at in np.flatnonzero(over).tolist():
                self._hold(at, self.listed[at].held + 1)
        else:
            self._read_computed(0)

    def rows(self, running: list[Any]) -> tuple[Column, Column, Column]:
        """By column: a key, its tokens when they were last stamped, its blocks."""
        self.follow(running)
        columns = self._columns
        return columns[_KEY].view(np.uint64), columns[_TOKENS], columns[_HELD]

    def _read_computed(self, first: int) -> None:
        """Of these and all behind, and so what they hold."""
        for at in range(first, len(self._requests)):
            computed = self._requests[at].num_computed_tokens
            self._all_columns[_COMPUTED, at] = computed
            self._hold(at, -(-computed // self._size(at)))

    def _hold(self, at: int, blocks: int) -> None:
        self.listed[at].held = blocks
        self._all_columns[_HELD:, at] = blocks, blocks * self._size(at)

    def _size(self, at: int) -> int:
        """Tokens that a block holds of this one."""
        if not self._has_packed:
            return self._block_tokens
        return self.listed[at].per_block or self._block_tokens
