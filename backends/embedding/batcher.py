"""Which inputs are computed together next? The most urgent one, with those that cost it least padding.

Rule: calls stand as `on_time_first` has them: by deadline, but who cannot be in time behind. The window is
the longest prefix of their inputs whose tokens fit the budget. It is sorted by length and cut into
passes, each within the budget in *padded* tokens (inputs times the longest of them), within what the
caller allows for that length, and cut early where padding would cost more than starting another pass. The
pass holding the most urgent input goes out; the rest stays and is chosen again beside whatever arrived
meanwhile, so nothing waits behind what is less urgent for longer than one budget of tokens. An input
above the budget goes alone. Halves of a failed pass go first. The pass closes when it is asked for;
whoever asks learns from `is_worth_a_pass` whether what is here is worth one.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from backends.embedding.deadline_order import Key, by_key, deadline_key, on_time_first
from controlplane.core.clock import Instant

Caller = TypeVar("Caller")

# A smaller part than this many starts of a pass costs more than uneven lanes do, or a lane that waits.
_MIN_STARTS_PER_PASS = 8
_EPOCH = Instant(0)

MaxInputs = Callable[[int], int]
"""How many inputs a pass may hold, by the tokens of its longest."""


def _unlimited(_longest: int) -> int:
    return 2**31


@dataclass(eq=False, slots=True)
class QueuedCall(Generic[Caller]):
    """One request's inputs. `pending` holds the positions not yet given out, longest input first; `tokens` is
    their sum."""

    caller: Caller
    lengths: Sequence[int]
    key: Key
    pending: list[int]
    tokens: int
    is_discarded: bool = False


@dataclass(frozen=True, slots=True)
class Item(Generic[Caller]):
    """Input `position` of one call."""

    call: QueuedCall[Caller]
    position: int

    @property
    def tokens(self) -> int:
        return self.call.lengths[self.position]


@dataclass(frozen=True, slots=True)
class Batch(Generic[Caller]):
    """Inputs of one forward pass, longest first."""

    items: tuple[Item[Caller], ...]

    @property
    def padded_tokens(self) -> int:
        return len(self.items) * self.items[0].tokens

    def halves(self) -> tuple["Batch[Caller]", ...]:
        """Two smaller batches, or none when one input is all there is."""
        middle = len(self.items) // 2
        return (Batch(self.items[:middle]), Batch(self.items[middle:])) if middle else ()


@dataclass(slots=True)
class BatchQueue(Generic[Caller]):
    """`budget_tokens` bounds one pass in padded tokens; `pass_tokens` is what starting a pass costs,
    counted in tokens computed in the same time. Among `lanes` each takes its part of what the window
    holds (guided self-scheduling, Polychronopoulos and Kuck 1987), so that they end together."""

    budget_tokens: int
    pass_tokens: int = 0
    lanes: int = 1
    _calls: list[QueuedCall[Caller]] = field(default_factory=list)
    _retries: deque[Batch[Caller]] = field(default_factory=deque)
    _arrivals: "count[int]" = field(default_factory=count)
    _tokens: int = 0

    def is_worth_a_pass(self, budget_tokens: int) -> bool:
        """Whether company would hardly cheapen what is here, or there is no room for more in a pass."""
        if any(not item.call.is_discarded for batch in self._retries for item in batch.items):
            return True
        return self._tokens >= min(_MIN_STARTS_PER_PASS * self.pass_tokens, budget_tokens)

    @property
    def has_calls(self) -> bool:
        """With inputs not yet given out, halves of failed passes aside."""
        return bool(self._calls)

    def put(self, caller: Caller, lengths: Sequence[int], *, deadline: Instant | None) -> QueuedCall[Caller]:
        key = deadline_key(deadline, next(self._arrivals))
        longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        call = QueuedCall(caller, lengths, key, longest_first, sum(lengths))
        insort(self._calls, call, key=by_key)
        self._tokens += call.tokens
        return call

    def discard(self, call: QueuedCall[Caller]) -> None:
        """Its client left: what was not given out never will be. Twice is as good as once."""
        call.is_discarded = True
        if call.pending:
            self._tokens -= call.tokens
            call.pending, call.tokens = [], 0
            self._remove_call(call)

    def requeue(self, batches: Sequence[Batch[Caller]]) -> None:
        """These go out next, in this order and as they are; inputs of gone calls are left out then."""
        self._retries.extendleft(reversed(batches))

    def next_batch(
        self, max_inputs: MaxInputs = _unlimited, now: Instant = _EPOCH, ns_per_token: float = 0.0
    ) -> Batch[Caller] | None:
        """`ns_per_token` is the time in nanoseconds that a token takes lately; 0 if that is not known."""
        while self._retries:
            items = tuple(i for i in self._retries.popleft().items if not i.call.is_discarded)
            if items:
                limit = max(1, min(max_inputs(items[0].tokens), self.budget_tokens // items[0].tokens))
                if len(items) > limit:
                    self._retries.appendleft(Batch(items[limit:]))
                return Batch(items[:limit])
        if not self._calls:
            return None
        window = self._window(now, ns_per_token)
        most_urgent = window[0]
        chosen = next(p for p in self._split_into_passes(window, max_inputs) if most_urgent in p)
        self._remove(chosen)
        return Batch(tuple(chosen))

    def drain(self) -> list[QueuedCall[Caller]]:
        """Every call with inputs still here, each once; the queue is empty afterwards."""
        left = {id(c): c for c in self._calls}
        left |= {id(i.call): i.call for b in self._retries for i in b.items if not i.call.is_discarded}
        self._retries.clear()
        for call in left.values():
            self.discard(call)
        return list(left.values())

    def _window(self, now: Instant, ns_per_token: float) -> list[Item[Caller]]:
        window: list[Item[Caller]] = []
        tokens = 0
        for call in on_time_first(self._calls, now, ns_per_token):
            for position in call.pending:
                tokens += call.lengths[position]
                if window and tokens > self.budget_tokens:
                    return window
                window.append(Item(call, position))
        return window

    def _split_into_passes(
        self, window: list[Item[Caller]], max_inputs: MaxInputs
    ) -> list[list[Item[Caller]]]:
        passes: list[list[Item[Caller]]] = []
        longest = padding = limit = 0
        lane_share = max(
            _MIN_STARTS_PER_PASS * self.pass_tokens, -(-sum(i.tokens for i in window) // self.lanes)
        )
        room = self.budget_tokens if self.lanes == 1 else min(self.budget_tokens, lane_share)
        for item in sorted(window, key=lambda i: (-i.tokens, i.call.key, i.position)):
            padding += longest - item.tokens
            if passes and len(passes[-1]) < limit and padding <= self.pass_tokens:
                passes[-1].append(item)
            else:
                passes.append([item])
                longest, padding = item.tokens, 0
                limit = min(max_inputs(longest), room // longest)
        return passes

    def _remove(self, items: list[Item[Caller]]) -> None:
        taken: dict[int, tuple[QueuedCall[Caller], set[int]]] = {}
        self._tokens -= sum(item.tokens for item in items)
        for item in items:
            taken.setdefault(id(item.call), (item.call, set()))[1].add(item.position)
        for call, positions in taken.values():
            call.pending = [p for p in call.pending if p not in positions]
            call.tokens -= sum(call.lengths[p] for p in positions)
            if not call.pending:
                self._remove_call(call)

    def _remove_call(self, call: QueuedCall[Caller]) -> None:
        del self._calls[bisect_left(self._calls, call.key, key=by_key)]
