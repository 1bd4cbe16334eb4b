"""Simulated continuous batching over blocks of KV cache, as in stock vLLM.

Running sequences get their next tokens first, in the order in which they started, prompts in chunks within
the token budget of the step. If blocks run out, a sequence is preempted: it loses all its blocks and will
recompute. If none was preempted, waiting sequences start in order while blocks, budget and slots last. A step
that computes the last known token of a sequence produces one more. A sequence whose token ids are known
(`know_tokens`) starts on the leading blocks that the prefix cache has; its last token is always computed.
`SimulatedScheduler` serves in order of arrival, `RankedScheduler` by a rank per sequence, as vLLM's policies
`fcfs` and `priority`.

The scheduler has no clock: the caller lets the step take its time, then calls `complete`.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from backends.cost_models.step_time import StepLoad
from backends.simulated.prefix_cache import OUTPUT_TOKEN, CachedBlock, PrefixCache
from controlplane.core.prefix_index import block_hashes

_NEVER = 1 << 62


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One sequence; it ends after `output` tokens.

    `total` tokens are known, of which the first `computed` are in the KV cache; `produced` of them are
    output. The smallest `rank` starts first and is preempted last where the scheduler uses ranks; of equal
    ranks, the sequence with the earlier arrival. Of its `blocks` the leading `full` ones are in the prefix
    cache, and `found` tokens were there before its first start.
    """

    prompt: int
    output: int
    total: int = 0
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    preemptions: int = 0
    is_removed: bool = False
    rank: int = 0
    arrived: int = 0
    found: int = 0
    full: list[CachedBlock] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    fills_at: int = _NEVER
    """Computed tokens with which the block after `full` is full; never without token ids."""
    _tail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.total = self.prompt

    def know_tokens(self, prompt: Sequence[int], block_tokens: int) -> None:
        """Sets the token ids of the prompt, by which the prefix cache finds its blocks; call before `add`."""
        self.hashes, self.fills_at = block_hashes(prompt, block_tokens), block_tokens
        self._tail = tuple(prompt[len(self.hashes) * block_tokens :])

    def block_hash(self, at: int, block_tokens: int) -> int:
        """Hash of the full block at this position, the first beyond the prompt's or one known before."""
        if at == len(self.hashes):
            tokens = self._tail + (OUTPUT_TOKEN,) * (block_tokens - len(self._tail))
            self.hashes += block_hashes(tokens, block_tokens, self.hashes[-1] if at else 0)
            self._tail = ()
        return self.hashes[at]


S = TypeVar("S", bound=SimulatedSequence)


class SimulatedScheduler(Generic[S]):
    """Scheduler whose queues may be reordered between steps.

    The last of `running` is preempted first; the first of `waiting` starts first. `blocks` None means no
    memory limit. With `reserves_prompts` a sequence starts only if all its known tokens fit and not only its
    first chunk, as in vLLM (`scheduler_reserve_full_isl`).
    """

    def __init__(
        self,
        *,
        blocks: int | None,
        block_tokens: int,
        max_running: int,
        step_tokens: int,
        reserves_prompts: bool = False,
    ) -> None:
        if min(block_tokens, max_running, step_tokens) < 1:
            raise ValueError(
                f"block_tokens={block_tokens}, max_running={max_running}, step_tokens={step_tokens}: "
                "each must be at least 1"
            )
        self.waiting: deque[S] = deque()
        self.running: list[S] = []
        self.total_blocks = _NEVER if blocks is None else blocks
        self.free_blocks = self.total_blocks
        self._cache = PrefixCache()
        self.block_tokens = block_tokens
        self.max_running = max_running
        self.step_tokens = step_tokens
        self.preemptions = 0
        self.recompute_tokens = 0
        self._reserves_prompts = reserves_prompts
        self._batch: list[S] = []
        self._chunks: list[int] = []

    @property
    def waiting_count(self) -> int:
        """Number of waiting sequences."""
        return len(self.waiting)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold; one that several share counts once."""
        return self.total_blocks - self.free_blocks

    def add(self, sequence: S) -> None:
        """Adds a new sequence to the waiting queue."""
        self.waiting.append(sequence)

    def plan(self, load: StepLoad) -> bool:
        """Composes the next step and adds it to `load`; False if there is nothing to compute."""
        self._batch, self._chunks = [], []
        preemptions_before = self.preemptions
        budget = self._advance_running(self.step_tokens, load)
        if self.preemptions == preemptions_before:
            self._start_waiting(budget, load)
        return bool(self._batch)

    def _advance_running(self, budget: int, load: StepLoad) -> int:
        """Schedules running sequences and returns the rest of the token budget."""
        block, running, at = self.block_tokens, self.running, 0
        batch, chunks = self._batch, self._chunks
        decodes = cells = 0
        while at < len(running) and budget > 0:
            sequence = running[at]
            start = sequence.computed
            chunk = sequence.total - start
            if chunk > budget:
                chunk = budget
            end = start + chunk
            needed = -(-end // block) - sequence.blocks
            if needed > 0:
                is_preempted = False
                while self.free_blocks < needed and not is_preempted:
                    victim = self._victim()
                    # `batch` has one entry for each sequence before `at`.
                    if (index := running.index(victim)) < at:
                        at -= 1
                        budget += self._take_back(index, load)
                    self.preempt(victim)
                    is_preempted = victim is sequence
                if is_preempted:
                    break
                sequence.blocks += needed
                self._take(needed)
            if end >= sequence.fills_at:
                self._fill(sequence, end)
            if chunk == 1 and sequence.produced:
                decodes += 1
            else:
                load.prefill_tokens += chunk
                load.squares += chunk * (2 * start + chunk)
            cells += start
            budget -= chunk
            batch.append(sequence)
            chunks.append(chunk)
            at += 1
        load.decodes += decodes
        load.cells += cells
        return budget

    def _take_back(self, index: int, load: StepLoad) -> int:
        """Removes a sequence from the step being composed; returns the tokens of its chunk."""
        sequence, chunk = self._batch.pop(index), self._chunks.pop(index)
        if chunk == 1 and sequence.produced:
            load.decodes -= 1
        else:
            load.prefill_tokens -= chunk
            load.squares -= chunk * (2 * sequence.computed + chunk)
        load.cells -= sequence.computed
        return chunk

    def _victim(self) -> S:
        """The running sequence that is preempted first."""
        return self.running[-1]

    def _start_waiting(self, budget: int, load: StepLoad) -> None:
        block = self.block_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            found = self._cache.find(sequence.hashes, (sequence.total - 1) // block)
            start = len(found) * block
            chunk = min(sequence.total - start, budget)
            end = start + chunk
            # A cached block that no sequence uses is taken from the free ones as a new block is.
            in_use = sum(one.ref_cnt > 0 for one in found)
            needed = -(-end // block) - in_use
            room = -(-sequence.total // block) - in_use if self._reserves_prompts else needed
            if room > self.free_blocks:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self._start_on(sequence, found)
            sequence.blocks = -(-end // block)
            self._take(needed)
            if end >= sequence.fills_at:
                self._fill(sequence, end)
            if chunk == 1 and sequence.produced:
                load.decodes += 1
            else:
                load.prefill_tokens += chunk
                load.squares += chunk * (2 * start + chunk)
            load.cells += start
            budget -= chunk
            self._batch.append(sequence)
            self._chunks.append(chunk)

    def _start_on(self, sequence: S, found: list[CachedBlock]) -> None:
        """Gives a sequence that starts the cached blocks of its prefix."""
        if not sequence.preemptions:
            sequence.found = len(found) * self.block_tokens
        if found:
            self._cache.use(found)
            sequence.full, sequence.computed = found, len(found) * self.block_tokens
            sequence.fills_at = sequence.computed + self.block_tokens

    def _take(self, blocks: int) -> None:
        """Takes free blocks, of those that are cached the least recently used."""
        self.free_blocks -= blocks
        if len(self._cache) > self.free_blocks:
            self._cache.evict(self.free_blocks)

    def drop_cache(self) -> None:
        """Empties the prefix cache of free blocks."""
        self._cache.evict(0)

    def _fill(self, sequence: S, end: int) -> None:
        """Caches the blocks that this step fills, the sequence then having `end` computed tokens."""
        full, block = sequence.full, self.block_tokens
        for at in range(len(full), end // block):
            full.append(self._cache.add(sequence.block_hash(at, block)))
        sequence.fills_at = (len(full) + 1) * block

    def preempt(self, victim: S) -> None:
        """Frees the blocks of `victim`, which waits again."""
        self.running.remove(victim)
        self.recompute_tokens += self.recompute(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self._requeue(victim)

    def recompute(self, victim: S) -> int:
        """Tokens that preempting a sequence removes: those that no other sequence uses."""
        shared = sum(block.ref_cnt > 1 for block in victim.full) * self.block_tokens
        return max(0, victim.computed - shared)

    def _requeue(self, sequence: S) -> None:
        self.waiting.appendleft(sequence)

    def remove(self, sequence: S) -> None:
        """Removes a sequence; a step in flight produces no token for it."""
        sequence.is_removed = True
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: S) -> None:
        self.free_blocks += sequence.blocks
        if full := sequence.full:
            self.free_blocks += self._cache.release(full) - len(full)
            sequence.full, sequence.fills_at = [], self.block_tokens
        sequence.blocks = 0
        sequence.computed = 0

    def complete(self) -> list[S]:
        """Ends the planned step and returns the sequences that got a token.

        A sequence with `produced == output` has been removed.
        """
        emitted: list[S] = []
        has_ended = False
        for sequence, chunk in zip(self._batch, self._chunks, strict=True):
            if sequence.is_removed:
                continue
            sequence.computed += chunk
            if sequence.computed == sequence.total:
                sequence.total += 1
                sequence.produced += 1
                emitted.append(sequence)
                if sequence.produced >= sequence.output:
                    sequence.is_removed = has_ended = True
                    self._release(sequence)
        if has_ended:
            self.running = [sequence for sequence in self.running if not sequence.is_removed]
        return emitted


class RankedScheduler(SimulatedScheduler[S]):
    """Scheduler by rank and arrival, as vLLM with `scheduling_policy: priority`."""

    def add(self, sequence: S) -> None:
        """Adds a new sequence to the waiting queue."""
        insort(self.waiting, sequence, key=_precedence)

    def _requeue(self, sequence: S) -> None:
        insort(self.waiting, sequence, key=_precedence)

    def _victim(self) -> S:
        return max(self.running, key=_precedence)


def _precedence(sequence: SimulatedSequence) -> tuple[int, int]:
    return sequence.rank, sequence.arrived
