"""Simulated continuous batching over blocks of KV cache, as in stock vLLM.

Running sequences get their next tokens first, in the order in which they started, prompts in chunks within
the token budget of the step. If blocks run out, the sequence that started last is preempted: it loses all its
blocks and will recompute. If none was preempted, waiting sequences start in order while blocks, budget and
slots last. A step that computes the last known token of a sequence produces one more. There is no prefix
caching.

The scheduler has no clock: the caller lets the step take its time, then calls `complete`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from backends.cost_models.step_time import StepLoad


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One sequence; it ends after `output` tokens.

    `total` tokens are known, of which the first `computed` are in the KV cache; `produced` of them are
    output.
    """

    prompt: int
    output: int
    total: int = 0
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    preemptions: int = 0
    is_removed: bool = False

    def __post_init__(self) -> None:
        self.total = self.prompt


S = TypeVar("S", bound=SimulatedSequence)


class SimulatedScheduler(Generic[S]):
    """Scheduler whose queues may be reordered between steps.

    The last of `running` is preempted first; the first of `waiting` starts first. `blocks` None means no
    memory limit.
    """

    def __init__(self, *, blocks: int | None, block_tokens: int, max_running: int, step_tokens: int) -> None:
        if min(block_tokens, max_running, step_tokens) < 1:
            raise ValueError(
                f"block_tokens={block_tokens}, max_running={max_running}, step_tokens={step_tokens}: "
                "each must be at least 1"
            )
        self.waiting: deque[S] = deque()
        self.running: list[S] = []
        self.quota = 1 << 62 if blocks is None else blocks
        self.free_blocks = self.quota
        self.block_tokens = block_tokens
        self.max_running = max_running
        self.step_tokens = step_tokens
        self.preemptions = 0
        self.recompute_tokens = 0
        self._batch: list[S] = []
        self._chunks: list[int] = []

    def set_quota(self, blocks: int) -> None:
        """Sets the blocks, from the next step on."""
        self.free_blocks += blocks - self.quota
        self.quota = blocks

    def plan(self, load: StepLoad) -> bool:
        """Composes the next step and adds it to `load`; False if there is nothing to compute."""
        self._batch, self._chunks = [], []
        preemptions_before = self.preemptions
        while self.free_blocks < 0:
            self.preempt(self.running[-1])
        budget = self._advance_running(self.step_tokens, load)
        if self.preemptions == preemptions_before:
            self._start_waiting(budget, load)
        return bool(self._batch)

    def _advance_running(self, budget: int, load: StepLoad) -> int:
        """Schedules running sequences and returns the rest of the token budget."""
        block, running, at = self.block_tokens, self.running, 0
        batch, chunks = self._batch, self._chunks
        decodes = cells = 0
        # Preemption removes sequences from the end of `running`, at index `at` or after it.
        while at < len(running) and budget > 0:
            sequence = running[at]
            start = sequence.computed
            chunk = sequence.total - start
            if chunk > budget:
                chunk = budget
            needed = -(-(start + chunk) // block) - sequence.blocks
            if needed > 0:
                if not self._free_blocks_for(sequence, needed):
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

    def _free_blocks_for(self, sequence: S, needed: int) -> bool:
        """Preempts until `needed` blocks are free; False if that preempted `sequence` itself."""
        while self.free_blocks < needed:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _start_waiting(self, budget: int, load: StepLoad) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            chunk = min(sequence.total, budget)
            needed = -(-chunk // self.block_tokens)
            if needed > self.free_blocks:
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
        """Moves `victim` to the head of the waiting queue and frees its blocks."""
        self.running.remove(victim)
        self.recompute_tokens += victim.computed
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

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
