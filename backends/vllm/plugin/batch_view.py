"""Presents vLLM's running requests to the engine policy as a `RunningBatch`.

For each running request it tracks the tokens generated since the previous step, the blocks that preempting it
frees (`held`) and the blocks that this step will allocate. They follow from the computed tokens and from the
blocks that it shares with others through the prefix cache (`prefix_sharing`).
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.vllm.plugin.prefix_sharing import PrefixSharing
from backends.vllm.plugin.request_metadata import EngineRequest
from backends.vllm.plugin.shared_state import Column
from controlplane.core.clock import Instant
from controlplane.policy.engine.column_store import ColumnStore, Ints
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch

# Columns per request: its key in the shared state, and its computed tokens.
_KEY, _COMPUTED = range(2)


def stamp(request: Any, now: Instant) -> None:
    """Records the tokens that a request has gained since it was last stamped."""
    state: RequestState = request.tandem
    if new := request.num_tokens - state.tokens:
        state.stamp(now, new)


# Kinds of layers whose requests hold fewer blocks than their tokens take.
_WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")


def require_one_group(kv_cache_config: Any) -> None:
    """Raises ValueError if vLLM's blocks hold only some of the layers, so that a request takes more of them.

    The blocks of a request follow from its tokens, and quotas count blocks as if all held the same.
    """
    if (groups := len(kv_cache_config.kv_cache_groups)) > 1:
        raise ValueError(
            f"the model's layers form {groups} KV-cache groups with blocks of their own, and Tandem's "
            "scheduler counts blocks that hold all layers; set disable_hybrid_kv_cache_manager: true, or "
            "serve a model whose layers are all attention"
        )
    for group in kv_cache_config.kv_cache_groups:
        if type(group.kv_cache_spec).__name__ in _WINDOWED:
            raise ValueError(
                "all layers of the model have a window, and vLLM frees the blocks below it, which Tandem's "
                "scheduler counts; set disable_sliding_window: true"
            )


def is_ending(request: Any) -> bool:
    """Whether the step in flight produces the last token that `request` may have, so vLLM schedules no more.

    Only under asynchronous scheduling; the condition is that of vLLM's `schedule()`.
    """
    in_flight: int = request.num_output_placeholders
    computed: int = request.num_computed_tokens + 2 - in_flight
    return in_flight > 0 and computed >= request.num_prompt_tokens + request.max_tokens


class BatchTracker:
    """Columnar state of the running requests, updated incrementally from step to step.

    Almost all the time of a full scan is cache misses, so objects that cannot have changed are not read.
    `batch` is the policy's view, in vLLM's order.

    Args:
        block_tokens: tokens of a block of keys and values.
        has_packed: whether requests may have `block_tokens` of their own.
        runs_ahead: whether more tokens may be scheduled than are known (draft tokens, or a step in flight).
        takes_back: whether the number of computed tokens may fall while a request runs (rejected drafts, or a
            failed KV transfer).
        sharing: tracker of shared blocks; None if no request shares any.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        has_packed: bool,
        runs_ahead: bool,
        takes_back: bool,
        sharing: PrefixSharing | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._sharing = sharing
        # Shared and carried blocks of each request. `_is_stale` after they changed, until `held` follows.
        self._shared: tuple[Ints, Ints] | None = None
        self._is_stale = False
        self._has_packed = has_packed
        self._runs_ahead = runs_ahead
        self._takes_back = takes_back
        self._next_number = 0
        self._number_of: dict[RequestState, int] = {}
        self._requests: list[Any] = []
        self._token_ids: list[list[int]] = []
        # Arrival numbers in batch order; they increase, so a request is found by bisection.
        self._numbers: list[int] = []
        self._columns = ColumnStore(2, np.int64)
        self.batch = RunningBatch()

    def index_of(self, running: list[Any], state: RequestState) -> int:
        """Index of a running request in `running`. Raises KeyError if it does not run."""
        self.sync(running)
        return bisect_left(self._numbers, self._number_of[state])

    def remove(self, state: RequestState) -> None:
        """Removes a request that no longer runs, if it is present."""
        if (number := self._number_of.pop(state, None)) is not None:
            at = bisect_left(self._numbers, number)
            if self._sharing is not None:
                self._is_stale |= bool(self._sharing)
                self._sharing.leave(self._requests[at], state)
            del self._numbers[at], self._requests[at], self._token_ids[at]
            self._columns.drop(at)
            self.batch.pop(at)

    def sync(self, running: list[Any]) -> int:
        """Adds requests that started since the previous call, and returns how many others remained.

        vLLM appends started requests at the end.
        """
        remained = len(self._requests)
        if running == self._requests:
            return remained
        self._append(running[remained:])
        if running == self._requests:
            return remained
        # A request left without a call of `remove`: rebuild everything.
        for state in list(self.batch):
            self.remove(state)
        self._append(running)
        return 0

    def _append(self, started: list[Any]) -> None:
        for request in started:
            state, computed = request.tandem, request.num_computed_tokens
            self._requests.append(request)
            # vLLM only appends to this list. Reading its length through the request is three times slower.
            self._token_ids.append(request._all_token_ids)
            self._numbers.append(self._next_number)
            self._number_of[state] = self._next_number
            self._next_number += 1
            state.held = -(-computed // (state.block_tokens or self._block_tokens))
            if self._sharing is not None:
                self._sharing.start(request, state, self._states)
                self._is_stale |= bool(self._sharing)
            self.batch.add(state)
            self._columns.put(len(self._columns), (0, computed))
            self._columns.column(_KEY).view(np.uint64)[-1] = state.key

    def set_forecast(self, state: EngineRequest) -> None:
        """Updates the batch after the request's forecast has changed."""
        if state in self._number_of:
            self.batch.set_forecast(state)

    def stamp(self, running: list[Any], now: Instant, *, is_in_flight: bool) -> None:
        """Records new tokens of all running requests; `is_in_flight` if a step has not finished yet."""
        self.sync(running)
        if is_in_flight or self._runs_ahead or self._takes_back:
            tokens = np.fromiter(map(len, self._token_ids), np.int64, len(self._token_ids))
        else:
            # A request whose last token was computed has gained one token.
            tokens = np.maximum(self.batch.tokens, self._columns.column(_COMPUTED) + 1)
        self.batch.stamp(tokens, now)

    def growth(self, max_step_tokens: int) -> int:
        """Updates the blocks held and returns the blocks that this step will allocate; call after `stamp`."""
        if self._takes_back or self._has_packed:
            self._read_computed()
        elif self._is_stale:
            self._hold_computed(slice(None))
        known = self.batch.tokens
        if self._runs_ahead:
            known = known + [len(r.spec_token_ids) + r.num_output_placeholders for r in self._requests]
        limit = np.minimum(known, self._columns.column(_COMPUTED) + max_step_tokens)
        growth: Ints = self._blocks(limit, slice(None)) - self.batch.held
        if self._sharing:
            growth = growth - self._sharing_columns()[0]
        return sum(growth.tolist())

    def record_step(self, running: list[Any], tokens: Mapping[str, int], total: int) -> None:
        """Records a step just scheduled: `tokens` by vLLM request id, `total` their sum."""
        remained = self.sync(running)
        new_tokens = sum(tokens.get(request.request_id, 0) for request in self._requests[remained:])
        if len(tokens) == len(running) and total - new_tokens == remained:
            # Every other request computes exactly one token.
            self._columns.column(_COMPUTED)[:remained] += 1
            self._hold_computed(slice(None) if self._is_stale else slice(remained))
        else:
            self._read_computed()

    def rows(self, running: list[Any]) -> tuple[Column, Column]:
        """Columns for the shared state: key and blocks of each request.

        The blocks add up to those in use: of the readers of a shared block, one carries it.
        """
        self.sync(running)
        if self._is_stale:
            self._hold_computed(slice(None))
        blocks = self.batch.held
        if self._sharing:
            blocks = blocks + self._sharing_columns()[1]
        return self._columns.column(_KEY).view(np.uint64), blocks

    def _read_computed(self) -> None:
        """Reads the computed tokens of all requests from vLLM, and updates the blocks held."""
        self._columns.column(_COMPUTED)[:] = [request.num_computed_tokens for request in self._requests]
        self._hold_computed(slice(None))

    def _hold_computed(self, index: slice) -> None:
        if self._is_stale:
            self._shared, self._is_stale = None, False
        blocks = self._blocks(self._columns.column(_COMPUTED)[index], index)
        self.batch.held[index] = blocks - self._sharing_columns()[0][index] if self._sharing else blocks

    def _states(self) -> list[RequestState]:
        return self.batch.requests(range(len(self.batch)))

    def _sharing_columns(self) -> tuple[Ints, Ints]:
        """Shared and carried blocks of each request, int64 [n] each; valid unless `_is_stale`."""
        if self._shared is None or len(self._shared[0]) != len(self.batch):
            states = self._states()
            shared = np.fromiter([state.shared for state in states], np.int64, len(states))
            carried = np.fromiter([state.carried for state in states], np.int64, len(states))
            self._shared = shared, carried
        return self._shared

    def _blocks(self, tokens: Ints, index: slice) -> Ints:
        """Blocks that hold `tokens` of the requests in the slice `index`."""
        size: Ints | int = self._block_tokens
        if self._has_packed:
            size = np.array([r.tandem.block_tokens or size for r in self._requests[index]], np.int64)
        return (tokens + (size - 1)) // size
