"""Simulated continuous batching over blocks of KV cache, as in stock vLLM.

Running sequences get their next tokens first, in the order in which they started, prompts in chunks within
the token budget of the step. If blocks run out, a sequence is preempted: it loses all its blocks and will
recompute. If none was preempted, waiting sequences start in order while blocks, budget and slots last. A step
that computes the last known token of a sequence produces one more. There is no prefix caching.
`SimulatedScheduler` serves in order of arrival, `RankedScheduler` by a rank per sequence, as vLLM's policies
`fcfs` and `priority`.

The scheduler has no clock: the caller lets the step take its time, then calls `complete`.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from backends.cost_models.step_time import StepLoad


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One sequence; it ends after `output` tokens.

    `total` tokens are known, of which the first `computed` are in the KV cache; `produced` of them are
    output. The smallest `rank` starts first and is preempted last where the scheduler uses ranks; of equal
    ranks, the sequence with the earlier arrival.
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

    def __post_init__(self) -> None:
        self.total = self.prompt


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
        self.total_blocks = 1 << 62 if blocks is None else blocks
        self.free_blocks = self.total_blocks
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
        """Blocks that sequences hold."""
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
            needed = -(-(start + chunk) // block) - sequence.blocks
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
                self.free_blocks -= needed
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
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            chunk = min(sequence.total, budget)
            needed = -(-chunk // self.block_tokens)
            room = -(-sequence.total // self.block_tokens) if self._reserves_prompts else needed
            if room > self.free_blocks:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.blocks = needed
            self.free_blocks -= needed
            load.prefill_tokens += chunk
            load.squares += chunk * chunk
            budget -= chunk
            self._batch.append(sequence)
            self._chunks.append(chunk)

    def preempt(self, victim: S) -> None:
        """Frees the blocks of `victim`, which waits again."""
        self.running.remove(victim)
        self.recompute_tokens += victim.computed
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self._requeue(victim)

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
