"""Forms the next embedding batch: the most urgent input, with inputs that add little padding.

Calls are ordered by `on_time_first`. The window is the longest prefix of their inputs with at most
`window_tokens`. It is sorted by length and split into passes. Each pass stays within `window_tokens` in
padded tokens (inputs times the longest of them) and within the caller's limit for that length; a pass also
ends where padding would cost more than starting another one. Of the pass that contains the most urgent input,
as many of its most urgent inputs are returned as the caller chooses; the rest stays queued and competes with
later arrivals. An input therefore waits for at most one window of less urgent tokens. An input above the
limit forms a pass alone. Halves of a failed pass come first.

A pass is formed when it is requested; `is_worth_a_pass` states whether the queue justifies one.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from backends.embedding.deadline_order import DeadlineKey, by_key, deadline_key, on_time_first
from controlplane.core.clock import Instant

Payload = TypeVar("Payload")

# A pass of fewer tokens than this multiple of its start cost wastes more time than an idle or uneven lane.
_MIN_STARTS_PER_PASS = 8

MaxInputs = Callable[[int], int]
"""Inputs that a pass may hold, given the tokens of its longest input."""

ChooseSize = Callable[[Sequence["QueuedCall[Any]"], Sequence["Item[Any]"]], int]
"""How many of the inputs of a pass, the most urgent first, to compute now, given all queued calls, the most
urgent first; 0 for none."""


@dataclass(eq=False, slots=True)
class QueuedCall(Generic[Payload]):
    """Inputs of one request, of these `lengths` in tokens.

    `payload` belongs to the user of the queue. `pending` holds the positions of the inputs that are not part
    of any pass yet, longest first, and `tokens` the sum of their lengths. `weight` is that of the service
    class.
    """

    payload: Payload
    lengths: Sequence[int]
    key: DeadlineKey
    pending: list[int]
    tokens: int
    weight: float
    is_discarded: bool = False


@dataclass(frozen=True, slots=True)
class Item(Generic[Payload]):
    """Input `position` of one call."""

    call: QueuedCall[Payload]
    position: int

    @property
    def tokens(self) -> int:
        """Length of the input in tokens."""
        return self.call.lengths[self.position]


@dataclass(frozen=True, slots=True)
class Batch(Generic[Payload]):
    """Inputs of one forward pass, longest first."""

    items: tuple[Item[Payload], ...]

    @property
    def padded_tokens(self) -> int:
        """Tokens of the pass when all inputs are padded to the longest."""
        return len(self.items) * self.items[0].tokens

    def halves(self) -> tuple["Batch[Payload]", ...]:
        """Two smaller batches; none if there is only one input."""
        middle = len(self.items) // 2
        return (Batch(self.items[:middle]), Batch(self.items[middle:])) if middle else ()

    def by_call(self) -> list["Batch[Payload]"]:
        """One batch for each call that has inputs in this one."""
        own: dict[int, list[Item[Payload]]] = {}
        for item in self.items:
            own.setdefault(id(item.call), []).append(item)
        return [Batch(tuple(items)) for items in own.values()]


@dataclass(slots=True)
class BatchQueue(Generic[Payload]):
    """Queue of calls that are split into batches.

    Each of `lanes` takes its share of the window (guided self-scheduling, Polychronopoulos and Kuck 1987), so
    that all lanes end at about the same time.

    Args:
        window_tokens: tokens of the queued inputs that the next pass is chosen from; no pass has more.
        start_tokens: cost of starting a pass, in tokens computed in the same time.
        lanes: passes computed concurrently.
    """

    window_tokens: int
    start_tokens: int = 0
    lanes: int = 1
    _calls: list[QueuedCall[Payload]] = field(default_factory=list)
    _retries: deque[Batch[Payload]] = field(default_factory=deque)
    _arrivals: "count[int]" = field(default_factory=count)
    _tokens: int = 0

    def is_worth_a_pass(self, budget_tokens: int) -> bool:
        """Whether to start a pass now although more inputs may arrive.

        True if a failed pass is to be retried, if starting a pass costs little compared with the queued
        tokens, or if they fill a pass of `budget_tokens`.
        """
        if any(not item.call.is_discarded for batch in self._retries for item in batch.items):
            return True
        return self._tokens >= min(_MIN_STARTS_PER_PASS * self.start_tokens, budget_tokens)

    @property
    def calls(self) -> Sequence[QueuedCall[Payload]]:
        """The calls with inputs that are not part of any pass yet, by deadline."""
        return self._calls

    @property
    def has_calls(self) -> bool:
        """Whether inputs are queued, halves of failed passes excluded."""
        return bool(self._calls)

    def put(
        self, payload: Payload, lengths: Sequence[int], *, deadline: Instant | None, weight: float = 1.0
    ) -> QueuedCall[Payload]:
        """Queues a call with inputs of these lengths, in tokens."""
        key = deadline_key(deadline, next(self._arrivals))
        longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        call = QueuedCall(payload, lengths, key, longest_first, sum(lengths), weight)
        insort(self._calls, call, key=by_key)
        self._tokens += call.tokens
        return call

    def discard(self, call: QueuedCall[Payload]) -> None:
        """Drops all inputs of a call that are not part of a pass yet. Idempotent."""
        call.is_discarded = True
        if call.pending:
            self._tokens -= call.tokens
            call.pending, call.tokens = [], 0
            self._remove_call(call)

    def requeue(self, batches: Sequence[Batch[Payload]]) -> None:
        """Makes these batches the next ones, in this order; inputs of discarded calls are left out then."""
        self._retries.extendleft(reversed(batches))

    def next_batch(
        self, max_inputs: MaxInputs, now: Instant, ns_per_token: float, choose_size: ChooseSize
    ) -> Batch[Payload] | None:
        """Removes and returns the next batch, or None if no input is queued or `choose_size` takes none.

        Args:
            max_inputs: inputs that a pass may hold, given the tokens of its longest input.
            now: current time, to find calls that must be late.
            ns_per_token: recent service time of a token in nanoseconds; 0 if unknown.
            choose_size: shortens the pass; retries are never shortened.
        """
        while self._retries:
            items = tuple(i for i in self._retries.popleft().items if not i.call.is_discarded)
            if items:
                limit = max(1, min(max_inputs(items[0].tokens), self.window_tokens // items[0].tokens))
                if len(items) > limit:
                    self._retries.appendleft(Batch(items[limit:]))
                return Batch(items[:limit])
        if not self._calls:
            return None
        calls = list(on_time_first(self._calls, now, ns_per_token))
        window = self._window(calls)
        most_urgent = window[0]
        longest_first = next(p for p in self._split_into_passes(window, max_inputs) if most_urgent in p)
        members = set(longest_first)
        size = choose_size(calls, urgent_first := [item for item in window if item in members])
        if size == 0:
            return None
        taken = set(urgent_first[:size])
        chosen = [item for item in longest_first if item in taken]
        self._remove(chosen)
        return Batch(tuple(chosen))

    def drain(self) -> list[QueuedCall[Payload]]:
        """Empties the queue and returns every call that still had inputs in it, once."""
        left = {id(c): c for c in self._calls}
        left |= {id(i.call): i.call for b in self._retries for i in b.items if not i.call.is_discarded}
        self._retries.clear()
        for call in left.values():
            self.discard(call)
        return list(left.values())

    def _window(self, calls: Sequence[QueuedCall[Payload]]) -> list[Item[Payload]]:
        window: list[Item[Payload]] = []
        tokens = 0
        for call in calls:
            for position in call.pending:
                tokens += call.lengths[position]
                if window and tokens > self.window_tokens:
                    return window
                window.append(Item(call, position))
        return window

    def _split_into_passes(
        self, window: list[Item[Payload]], max_inputs: MaxInputs
    ) -> list[list[Item[Payload]]]:
        passes: list[list[Item[Payload]]] = []
        longest = padding = limit = 0
        lane_share = max(
            _MIN_STARTS_PER_PASS * self.start_tokens, -(-sum(i.tokens for i in window) // self.lanes)
        )
        room = self.window_tokens if self.lanes == 1 else min(self.window_tokens, lane_share)
        for item in sorted(window, key=lambda i: (-i.tokens, i.call.key, i.position)):
            padding += longest - item.tokens
            if passes and len(passes[-1]) < limit and padding <= self.start_tokens:
                passes[-1].append(item)
            else:
                passes.append([item])
                longest, padding = item.tokens, 0
                limit = min(max_inputs(longest), room // longest)
        return passes

    def _remove(self, items: list[Item[Payload]]) -> None:
        taken: dict[int, tuple[QueuedCall[Payload], set[int]]] = {}
        self._tokens -= sum(item.tokens for item in items)
        for item in items:
            taken.setdefault(id(item.call), (item.call, set()))[1].add(item.position)
        for call, positions in taken.values():
            call.pending = [p for p in call.pending if p not in positions]
            call.tokens -= sum(call.lengths[p] for p in positions)
            if not call.pending:
                self._remove_call(call)

    def _remove_call(self, call: QueuedCall[Payload]) -> None:
        del self._calls[bisect_left(self._calls, call.key, key=by_key)]
