"""Which tokens does an LLM engine compute in its next step? Continuous batching over blocks of KV cache.

Rule, as stock vLLM: all that run get their next tokens first, in the order they joined, prompts in
chunks within the step's token budget; where blocks run out the last of them is preempted, gives up all its
blocks and will recompute. If nobody was preempted, those that wait join in order while blocks, budget and
slots last. A step that completes a sequence's known tokens yields sequence more. No prefix is reused. No clock,
no waiting: the caller lets the step last, then calls `complete`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from backends.cost_models.step_time import StepLoad


@dataclass(eq=False, slots=True)
class Sequence:
    """`total` tokens are known, the first `computed` of them are in the cache, `produced` are output;
    it ends after `output`."""

    prompt: int
    output: int
    total: int = 0
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    preemptions: int = 0
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.total = self.prompt


S = TypeVar("S", bound=Sequence)


class SimulatedScheduler(Generic[S]):
    """`running` and `waiting` may be reordered between steps: the last of `running` is preempted first, the
    first of `waiting` joins first. `blocks` is None without a memory limit."""

    def __init__(self, *, blocks: int | None, block_tokens: int, max_running: int, step_tokens: int) -> None:
        if min(block_tokens, max_running, step_tokens) < 1:
            raise ValueError(
                f"block_tokens={block_tokens}, max_running={max_running}, step_tokens={step_tokens}: "
                "each is at least 1"
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
        """In force from the next step on."""
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
        """What is left of the budget."""
        block, running, at = self.block_tokens, self.running, 0
        batch, chunks = self._batch, self._chunks
        decodes = cells = 0
        # Preemption shortens `running` from its end, beyond `at` or at it.
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
        """False if `sequence` was itself the last to be preempted."""
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
        """Back to the head of those that wait, without its blocks."""
        self.running.remove(victim)
        self.recompute_tokens += victim.computed
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def remove(self, sequence: S) -> None:
        """Gone, whatever it was doing; a step under way counts nothing for it."""
        sequence.is_gone = True
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
        """The planned step is over. Returns those that got a token; `produced == output` has left."""
        emitted: list[S] = []
        has_ended = False
        for sequence, chunk in zip(self._batch, self._chunks, strict=True):
            if sequence.is_gone:
                continue
            sequence.computed += chunk
            if sequence.computed == sequence.total:
                sequence.total += 1
                sequence.produced += 1
                emitted.append(sequence)
                if sequence.produced >= sequence.output:
                    sequence.is_gone = has_ended = True
                    self._release(sequence)
        if has_ended:
            self.running = [sequence for sequence in self.running if not sequence.is_gone]
        return emitted
