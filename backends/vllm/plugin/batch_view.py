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

from backends.vllm.plugin.request_metadata import EngineRequest
from backends.vllm.plugin.shared_state import Column
from controlplane.core.clock import Instant
from controlplane.policy.engine.column_store import ColumnStore, Ints
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch

# Of each: its key on the board, and its computed tokens.
_KEY, _COMPUTED = range(2)


def stamp(request: Any, now: Instant) -> None:
    progress: RequestState = request.tandem
    if new := request.num_tokens - progress.tokens:
        progress.stamp(now, new)


class BatchTracker:
    """Those that run, by column, kept from step to step: nearly all time of a look is waiting for memory, so
    no object is touched that cannot have changed. `batch` is what we know of them, in vLLM's order.

    `runs_ahead` if more is computed than there is (drafts, or a step in flight), `takes_back` if computed
    tokens may be taken back while a request runs (drafts, or a transfer that failed)."""

    def __init__(self, block_tokens: int, *, has_packed: bool, runs_ahead: bool, takes_back: bool) -> None:
        self._block_tokens = block_tokens
        self._has_packed = has_packed
        self._runs_ahead = runs_ahead
        self._takes_back = takes_back
        self._next_number = 0
        self._number_of: dict[RequestState, int] = {}
        self._requests: list[Any] = []
        self._token_ids: list[list[int]] = []
        # In the order of the crowd: a number that rises with each that comes.
        self._numbers: list[int] = []
        self._columns = ColumnStore(2, np.int64)
        self.batch = RunningBatch()

    def index_of(self, running: list[Any], progress: RequestState) -> int:
        """Of one that runs. Raises KeyError for any other."""
        self.sync(running)
        return bisect_left(self._numbers, self._number_of[progress])

    def remove(self, progress: RequestState) -> None:
        """It runs no more."""
        if (number := self._number_of.pop(progress, None)) is not None:
            at = bisect_left(self._numbers, number)
            del self._numbers[at], self._requests[at], self._token_ids[at]
            self._columns.drop(at)
            self.batch.pop(at)

    def sync(self, running: list[Any]) -> int:
        """How many stayed. Newcomers are always last."""
        stayed = len(self._requests)
        if running == self._requests:
            return stayed
        self._append(running[stayed:])
        if running == self._requests:
            return stayed
        # Somebody left in a way that is unknown here.
        for progress in list(self.batch):
            self.remove(progress)
        self._append(running)
        return 0

    def _append(self, newcomers: list[Any]) -> None:
        for request in newcomers:
            progress, computed = request.tandem, request.num_computed_tokens
            self._requests.append(request)
            # Never bound anew by vLLM, whose scheduler reads it too; to ask for its length through the
            # request takes three times as long.
            self._token_ids.append(request._all_token_ids)
            self._numbers.append(self._next_number)
            self._number_of[progress] = self._next_number
            self._next_number += 1
            progress.held = -(-computed // (progress.per_block or self._block_tokens))
            self.batch.add(progress)
            self._columns.put(len(self._columns), (0, computed))
            self._columns.column(_KEY).view(np.uint64)[-1] = progress.key

    def set_forecast(self, progress: EngineRequest) -> None:
        """It has another forecast now."""
        if progress in self._number_of:
            self.batch.set_forecast(progress)

    def stamp(self, running: list[Any], now: Instant, *, is_in_flight: bool) -> None:
        """`is_in_flight` if a step has not ended yet."""
        self.sync(running)
        if is_in_flight or self._runs_ahead or self._takes_back:
            tokens = np.fromiter(map(len, self._token_ids), np.int64, len(self._token_ids))
        else:
            # The step that computed the last token of one has given it another.
            tokens = np.maximum(self.batch.tokens, self._columns.column(_COMPUTED) + 1)
        self.batch.stamp(tokens, now)

    def growth(self, max_step_tokens: int) -> int:
        """Blocks that this step asks for, and brings what each holds up to date. After `stamp`."""
        if self._takes_back or self._has_packed:
            self._read_computed()
        known = self.batch.tokens
        if self._runs_ahead:
            known = known + [len(one.spec_token_ids) + one.num_output_placeholders for one in self._requests]
        most = np.minimum(known, self._columns.column(_COMPUTED) + max_step_tokens)
        asked: Ints = self._blocks(most, slice(None)) - self.batch.held
        return sum(asked.tolist())

    def record_step(self, running: list[Any], tokens: Mapping[str, int], total: int) -> None:
        """A step computes so many tokens of each, and in all. Call right after it was scheduled."""
        stayed = self.sync(running)
        theirs = sum(tokens.get(request.request_id, 0) for request in self._requests[stayed:])
        if len(tokens) == len(running) and total - theirs == stayed:
            # Everybody else got one.
            self._columns.column(_COMPUTED)[:stayed] += 1
            self._hold_computed(slice(stayed))
        else:
            self._read_computed()

    def rows(self, running: list[Any]) -> tuple[Column, Column, Column]:
        """By column: a key, its tokens when they were last stamped, its blocks."""
        self.sync(running)
        return self._columns.column(_KEY).view(np.uint64), self.batch.tokens, self.batch.held

    def _read_computed(self) -> None:
        """And so what they hold."""
        self._columns.column(_COMPUTED)[:] = [one.num_computed_tokens for one in self._requests]
        self._hold_computed(slice(None))

    def _hold_computed(self, some: slice) -> None:
        self.batch.held[some] = self._blocks(self._columns.column(_COMPUTED)[some], some)

    def _blocks(self, tokens: Ints, some: slice) -> Ints:
        """That hold so many tokens of each of them."""
        size: Ints | int = self._block_tokens
        if self._has_packed:
            size = np.array([one.tandem.per_block or size for one in self._requests[some]], np.int64)
        return (tokens + (size - 1)) // size
