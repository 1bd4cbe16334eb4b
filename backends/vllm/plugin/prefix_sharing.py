"""Tracks the KV-cache blocks that several requests use at once through vLLM's prefix cache.

A block counts once, however many running requests read it: preempting one of several readers frees nothing,
and of its readers the one that started last carries it in the server's ledger. A waiting request whose prefix
is cached needs no computation for it; of its blocks only those in use by running requests cost it no memory,
since a cached block that no request uses is on vLLM's free list and must be taken from it.

vLLM changes the reference count of a block only when a request starts on cached blocks or leaves, so nothing
is computed in other steps. What waiting requests find is looked up when they enter the queue, and again a few
per step after the first reader of their prefix has started or the last one has left. A value may therefore be
stale; vLLM itself decides whether a request fits, and one that did not start although offered is looked up
again.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from controlplane.policy.engine.request_state import RequestState

_LOOKUPS_PER_STEP = 8

RunningStates = Callable[[], Sequence[RequestState]]


class SharedBlocks:
    """The blocks that at least two running requests use, with their readers in order of start.

    Keeps `shared`, `carried` and `cached` of each reader up to date.

    Args:
        blocks_of: blocks by vLLM request id, each with `block_id` and `ref_cnt`.
        block_tokens: tokens of a block.
    """

    def __init__(self, blocks_of: Mapping[str, Sequence[Any]], block_tokens: int) -> None:
        self._blocks_of = blocks_of
        self._block_tokens = block_tokens
        self._readers: dict[int, dict[RequestState, None]] = {}
        self._shared_of: dict[RequestState, set[int]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def start(self, state: RequestState, running: RunningStates) -> None:
        """Adds a request that has started; `running` gives the requests that started before it."""
        state.shared = state.carried = state.cached = 0
        other: RequestState | None = None
        for at, block in enumerate(self._blocks_of.get(state.request.id, ())):
            if block.ref_cnt < 2:
                continue
            readers = self._readers.get(block.block_id)
            if readers is None:
                # A cached block has the same position in each request that uses it.
                if other is None or not self._uses(other, at, block):
                    other = next((one for one in running() if self._uses(one, at, block)), None)
                if other is None:
                    # The other readers start after this one in the same step, and then find it.
                    break
                readers = self._readers[block.block_id] = {}
                self._add_reader(readers, block.block_id, other)
            next(reversed(readers)).carried -= 1
            self._add_reader(readers, block.block_id, state)

    def _add_reader(self, readers: dict[RequestState, None], block_id: int, state: RequestState) -> None:
        readers[state] = None
        self._shared_of.setdefault(state, set()).add(block_id)
        state.shared += 1
        state.carried += 1
        state.cached = state.shared * self._block_tokens

    def _uses(self, state: RequestState, at: int, block: Any) -> bool:
        blocks = self._blocks_of.get(state.request.id, ())
        return at < len(blocks) and blocks[at] is block

    def leave(self, state: RequestState) -> None:
        """Removes a request that no longer runs; does nothing if it shares no block."""
        for block_id in self._shared_of.pop(state, ()):
            readers = self._readers[block_id]
            is_carrier = next(reversed(readers)) is state
            del readers[state]
            last = next(reversed(readers))
            last.carried += is_carrier
            if len(readers) == 1:
                del self._readers[block_id]
                self._shared_of[last].remove(block_id)
                last.shared -= 1
                last.carried -= 1
                last.cached = last.shared * self._block_tokens
        state.shared = state.carried = state.cached = 0


class WaitingPrefixes:
    """Looks up the cached prefixes of waiting requests, and again after the sharing may have changed.

    Keeps `shared` and `cached` of each waiting request up to date.

    Args:
        pool: vLLM's block pool.
        block_tokens: tokens of a block.
    """

    def __init__(self, pool: Any, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        # Waiting requests by the hash of their first block; those looked up last come last.
        self._groups: dict[bytes, dict[str, Any]] = {}
        # Lookups still to do per group.
        self._stale: dict[bytes, int] = {}
        self._hits: set[str] = set()

    @property
    def has_hits(self) -> bool:
        """Whether a waiting request would share blocks with a running one."""
        return bool(self._hits)

    def enqueue(self, request: Any) -> None:
        """Looks up a request that waits from now on."""
        if (first := self._first(request)) is not None:
            self._groups.setdefault(first, {})[request.request_id] = request
            self._look_up(request)

    def dequeue(self, request: Any) -> None:
        """Forgets a request that no longer waits."""
        first = self._first(request)
        self._hits.discard(request.request_id)
        if first is None or (group := self._groups.get(first)) is None:
            return
        group.pop(request.request_id, None)
        if not group:
            del self._groups[first]
            self._stale.pop(first, None)

    def sharing_changed(self, request: Any) -> None:
        """Marks the waiting requests that begin as `request` does, which has started or left."""
        if (group := self._groups.get(self._first(request) or b"")) is not None:
            self._stale[request.block_hashes[0]] = len(group)

    def refresh(self) -> None:
        """Repeats a few of the lookups that may be stale."""
        for _ in range(_LOOKUPS_PER_STEP):
            if not self._stale:
                return
            first, left = next(iter(self._stale.items()))
            group = self._groups[first]
            request = group.pop(name := next(iter(group)))
            group[name] = request
            self._look_up(request)
            if left > 1:
                self._stale[first] = left - 1
            else:
                del self._stale[first]

    def recheck(self, requests: Iterable[Any]) -> None:
        """Repeats the lookup of requests that were offered and could not start."""
        for request in requests:
            if request.request_id in self._hits:
                self._look_up(request)

    def _first(self, request: Any) -> bytes | None:
        """Hash of the first block; None if the request is shorter or reads no prefix cache."""
        hashes = request.block_hashes
        return hashes[0] if hashes and not request.skip_reading_prefix_cache else None

    def _look_up(self, request: Any) -> None:
        # The last token is always computed. Both searches assume that what holds for a block holds for those
        # before it: a prefix is used from its start, and vLLM evicts it from its end.
        hashes, most = request.block_hashes, (request.num_tokens - 1) // self._block_tokens
        blocks = range(min(len(hashes), most))
        cached = bisect_left(blocks, True, key=lambda at: self._block(hashes[at]) is None)
        shared = bisect_left(blocks[:cached], True, key=lambda at: not self._is_used(hashes[at]))
        request.tandem.cached, request.tandem.shared = cached * self._block_tokens, shared
        if shared:
            self._hits.add(request.request_id)
        else:
            self._hits.discard(request.request_id)

    def _block(self, block_hash: bytes) -> Any:
        found = self._pool.get_cached_block(block_hash, [0])
        return found[0] if found else None

    def _is_used(self, block_hash: bytes) -> bool:
        block = self._block(block_hash)
        return block is not None and block.ref_cnt > 0


class PrefixSharing:
    """The shared blocks of running requests, and those that waiting requests would share.

    The start or end of one of several readers of a prefix changes little for waiting requests, which then are
    not looked up again.
    """

    def __init__(self, pool: Any, blocks_of: Mapping[str, Sequence[Any]], block_tokens: int) -> None:
        self.blocks = SharedBlocks(blocks_of, block_tokens)
        self.waiting = WaitingPrefixes(pool, block_tokens)

    def __bool__(self) -> bool:
        return len(self.blocks) > 0 or self.waiting.has_hits

    def start(self, request: Any, state: RequestState, running: RunningStates) -> None:
        """Adds a request that has started; `running` gives the requests that started before it."""
        self.blocks.start(state, running)
        if not state.shared:
            self.waiting.sharing_changed(request)

    def leave(self, request: Any, state: RequestState) -> None:
        """Removes a request that no longer runs."""
        was_sole_reader = not state.shared
        self.blocks.leave(state)
        if was_sole_reader:
            self.waiting.sharing_changed(request)


def prefix_sharing(kv_cache_manager: Any, block_tokens: int) -> PrefixSharing | None:
    """The tracker for vLLM's KVCacheManager; None if it shares no blocks.

    Also None for a cache with several groups of layers, where a block holds the tokens of one group only.
    """
    managers, pool = kv_cache_manager.coordinator.single_type_managers, kv_cache_manager.block_pool
    if not kv_cache_manager.enable_caching or len(managers) != 1:
        return None
    if managers[0].block_size != block_tokens or pool.hash_block_size != block_tokens:
        return None
    return PrefixSharing(pool, managers[0].req_to_blocks, block_tokens)
