"""Bounds the padded tokens of the next embedding pass by speed, memory and recent out-of-memory errors.

The tightest of three bounds applies:

- `full_tokens`: the configured `batch_tokens`, or less if larger passes are not faster;
- bytes: the share of the embedding quota that one lane may take, by the memory model;
- recent out-of-memory errors: half of the failed pass, raised by a sixteenth after every pass near the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import ObservedTime

_RECOVERY_PASSES = 16


@dataclass(slots=True)
class PassBudget:
    """Bounds of a pass, learned and configured.

    `bytes` is the limit of all batches in flight together; None means no limit. `lanes` is the number of
    passes that the worker computes concurrently.
    """

    full_tokens: int
    lanes: int
    memory: EmbeddingMemory
    time: ObservedTime
    bytes: int | None = None
    _oom_limit_tokens: int | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        """Padded tokens of one pass."""
        bounds = [self.full_tokens]
        if self._oom_limit_tokens is not None:
            bounds.append(self._oom_limit_tokens)
        if self.bytes is not None:
            bounds.append(self.memory.max_tokens(self.bytes // self.lanes))
        return max(1, min(bounds))

    def max_inputs(self, longest: int) -> int:
        """Inputs that one pass may hold if its longest input has `longest` tokens."""
        return max(1, self.tokens // longest)

    def seconds(self, token_counts: Sequence[int]) -> float:
        """Predicted time of these inputs on an otherwise idle device.

        The inputs are sorted by length, split into passes and spread over the lanes.
        """
        ordered = sorted(token_counts, reverse=True)
        passes: list[float] = []
        at = 0
        while at < len(ordered):
            inputs = min(self.max_inputs(ordered[at]), len(ordered) - at)
            passes.append(self.time.seconds(inputs, ordered[at]))
            at += inputs
        return max(sum(passes) / self.lanes, max(passes, default=0.0))

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Largest number of bytes that these inputs take while they are computed."""
        return min(self.lanes, len(token_counts)) * self.memory.batch_bytes(
            token_counts, budget_tokens=self.tokens
        )

    def fits_with(self, in_flight: list[int], pass_bytes: int) -> bool:
        """Whether a pass of `pass_bytes` fits in memory together with those in flight.

        Only the `lanes` largest passes are computed at once.
        """
        if self.bytes is None or not in_flight:
            return True
        return sum(sorted([*in_flight, pass_bytes])[-self.lanes :]) <= self.bytes

    def inherit(self, previous: "PassBudget") -> None:
        """Takes over limits set and learned with the previous worker."""
        self.bytes, self._oom_limit_tokens = previous.bytes, previous._oom_limit_tokens

    def record_out_of_memory(self, padded_tokens: int) -> None:
        """Halves the bound after a pass of `padded_tokens` ran out of memory."""
        self._oom_limit_tokens = max(1, min(padded_tokens, self.tokens) // 2)

    def record_success(self, padded_tokens: int) -> None:
        """Raises the bound after a pass of at least half of it."""
        if self._oom_limit_tokens is None or 2 * padded_tokens < self._oom_limit_tokens:
            return
        self._oom_limit_tokens += max(1, self._oom_limit_tokens // _RECOVERY_PASSES)
        if self._oom_limit_tokens >= self.full_tokens:
            self._oom_limit_tokens = None
