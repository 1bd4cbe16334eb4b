"""How large may the next pass be? The tightest of four bounds, one input at least.

- `full_tokens`: the configured `batch_tokens`, or less where more would not be faster;
- bytes: the share of the embedding quota that one lane may take, by the memory model;
- what has lately run out of memory: half of it, raised again by a sixteenth with every pass that came
  near the bound;
- time: what the caller allows for this pass, by the time model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import ObservedTime

_RECOVERY_PASSES = 16


@dataclass(slots=True)
class PassBudget:
    """`bytes` is what all batches in flight may take together; None: whatever they need. `lanes` is how
    many passes the worker computes side by side."""

    full_tokens: int
    lanes: int
    memory: EmbeddingMemory
    time: ObservedTime
    bytes: int | None = None
    _oom_limit_tokens: int | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        """Padded tokens of one pass, its time aside."""
        bounds = [self.full_tokens]
        if self._oom_limit_tokens is not None:
            bounds.append(self._oom_limit_tokens)
        if self.bytes is not None:
            bounds.append(self.memory.max_tokens(self.bytes // self.lanes))
        return max(1, min(bounds))

    def max_inputs(self, longest: int, limit_seconds: float | None) -> int:
        """Inputs that one pass may hold when the longest of them has this many tokens."""
        limit = max(1, self.tokens // longest)
        if limit_seconds is not None:
            limit = min(limit, self.time.max_inputs(longest, limit_seconds))
        return limit

    def seconds(self, token_counts: Sequence[int]) -> float:
        """All of these inputs, with nothing else to do: passes of like length, spread over the lanes."""
        ordered = sorted(token_counts, reverse=True)
        passes: list[float] = []
        at = 0
        while at < len(ordered):
            inputs = min(self.max_inputs(ordered[at], None), len(ordered) - at)
            passes.append(self.time.seconds(inputs, ordered[at]))
            at += inputs
        return max(sum(passes) / self.lanes, max(passes, default=0.0))

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """The most that these inputs take while they are computed."""
        return min(self.lanes, len(token_counts)) * self.memory.batch_bytes(
            token_counts, budget_tokens=self.tokens
        )

    def fits_with(self, in_flight: list[int], pass_bytes: int) -> bool:
        """Whether a pass of these bytes may join those under way: the largest run side by side."""
        if self.bytes is None or not in_flight:
            return True
        return sum(sorted([*in_flight, pass_bytes])[-self.lanes :]) <= self.bytes

    def inherit(self, previous: "PassBudget") -> None:
        """What was set and learned for the worker before this one."""
        self.bytes, self._oom_limit_tokens = previous.bytes, previous._oom_limit_tokens

    def record_out_of_memory(self, padded_tokens: int) -> None:
        """A pass of this size found no memory."""
        self._oom_limit_tokens = max(1, min(padded_tokens, self.tokens) // 2)

    def record_success(self, padded_tokens: int) -> None:
        if self._oom_limit_tokens is None or 2 * padded_tokens < self._oom_limit_tokens:
            return
        self._oom_limit_tokens += max(1, self._oom_limit_tokens // _RECOVERY_PASSES)
        if self._oom_limit_tokens >= self.full_tokens:
            self._oom_limit_tokens = None
