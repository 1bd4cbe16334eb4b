"""Every input is batched exactly once, by urgency, within the token budget."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.batcher import Batch, BatchQueue, QueuedCall
from controlplane.core.clock import Instant


def next_batch(queue, now=0):
    """The next batch, whole, without a limit on its inputs."""
    return queue.next_batch(lambda longest: 2**31, Instant(now), 0.0, lambda calls, items: len(items))


LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=12)
DEADLINES = st.none() | st.integers(0, 5).map(Instant)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), LENGTHS, DEADLINES),
        st.tuples(st.just("next"), st.just([]), st.none()),
        st.tuples(st.just("leave"), st.lists(st.integers(0, 30), min_size=1, max_size=1), st.none()),
        st.tuples(st.just("fail"), st.just([]), st.none()),
    ),
    max_size=40,
)


@dataclass
class Model:
    """Reference model of the queue: (deadline is None, deadline, arrival) of each queued input."""

    budget: int
    waiting: dict[tuple[int, int], tuple[bool, int, int]] = field(default_factory=dict)
    lengths: list[list[int]] = field(default_factory=list)

    def put(self, lengths, deadline):
        arrival = len(self.lengths)
        self.lengths.append(lengths)
        for position in range(len(lengths)):
            self.waiting[arrival, position] = (deadline is None, deadline or 0, arrival)

    def check_fresh(self, batch: Batch[int]) -> None:
        """Checks a batch taken from the queue and removes its items from the model."""
        items = [(i.call.payload, i.position) for i in batch.items]
        most_urgent = min(self.waiting.values())
        assert most_urgent in [self.waiting[i] for i in items]
        # No input overtakes more than one budget of more urgent tokens.
        last = max(self.waiting[i] for i in items)
        before = sum(self.lengths[a][p] for (a, p), key in self.waiting.items() if key < last)
        assert before < self.budget or len(items) == 1
        for item in items:
            del self.waiting[item]


@given(STEPS, st.integers(1, 400), st.integers(0, 200))
def test_every_input_is_batched_exactly_once_within_the_budget(steps, budget, start_tokens):
    queue: BatchQueue[int] = BatchQueue(budget, start_tokens)
    model = Model(budget)
    calls: list[QueuedCall[int]] = []
    answered: set[tuple[int, int]] = set()
    failed: list[tuple[int, int]] = []

    def take() -> bool:
        batch = next_batch(queue)
        if batch is None:
            return False
        assert len(batch.items) == 1 or batch.padded_tokens <= budget
        tokens = [i.tokens for i in batch.items]
        assert tokens == sorted(tokens, reverse=True)
        assert all(not i.call.is_discarded for i in batch.items)
        names = [(i.call.payload, i.position) for i in batch.items]
        if not failed:
            model.check_fresh(batch)
        else:
            assert names == failed[: len(names)]
            del failed[: len(names)]
        assert not answered & set(names)
        answered.update(names)
        return True

    for action, numbers, deadline in steps:
        if action == "put":
            model.put(numbers, deadline)
            calls.append(queue.put(len(calls), numbers, deadline=deadline))
        elif action == "next":
            take()
        elif action == "leave" and numbers[0] < len(calls):
            gone = numbers[0]
            queue.discard(calls[gone])
            model.waiting = {k: v for k, v in model.waiting.items() if k[0] != gone}
            failed[:] = [name for name in failed if name[0] != gone]
        elif action == "fail" and not failed and (batch := next_batch(queue)) is not None:
            model.check_fresh(batch)
            failed.extend((i.call.payload, i.position) for i in batch.items)
            queue.requeue(batch.halves() or [batch])
        if not failed and start_tokens:
            waiting = sum(model.lengths[number][position] for number, position in model.waiting)
            worth = min(8 * start_tokens, budget)
            assert queue.is_worth_a_pass(budget) == (waiting >= worth)
    while take():
        pass
    expected = {
        (number, position)
        for number, call in enumerate(calls)
        for position in range(len(call.lengths))
        if not call.is_discarded
    }
    assert expected <= answered
    assert not model.waiting


def test_a_large_call_is_split_longest_inputs_first():
    queue: BatchQueue[str] = BatchQueue(window_tokens=20, start_tokens=100)
    queue.put("one", [5, 10, 5, 10, 5], deadline=None)
    batches = []
    while (batch := next_batch(queue)) is not None:
        batches.append([i.position for i in batch.items])
    assert batches == [[1, 3], [0, 2, 4]]


def test_batches_follow_deadlines_and_calls_without_one_come_last():
    queue: BatchQueue[str] = BatchQueue(window_tokens=10)
    queue.put("never", [10], deadline=None)
    queue.put("late", [10], deadline=Instant(9))
    queue.put("soon", [10], deadline=Instant(3))
    order = [batch.items[0].call.payload for _ in range(3) if (batch := next_batch(queue))]
    assert order == ["soon", "late", "never"]


def test_late_calls_come_last_until_they_are_late_by_a_minute():
    minute = 60 * 10**9

    def order(now: int) -> list[str]:
        queue: BatchQueue[str] = BatchQueue(window_tokens=10)
        for caller, deadline in (("first", 3), ("second", 9), ("never", None), ("far", 2 * minute)):
            queue.put(caller, [10], deadline=None if deadline is None else Instant(deadline))
        batches = [next_batch(queue, now) for _ in range(4)]
        return [batch.items[0].call.payload for batch in batches if batch is not None]

    assert order(3) == ["first", "second", "far", "never"]
    assert order(4) == ["second", "far", "first", "never"]
    assert order(10) == ["far", "first", "second", "never"]
    assert order(minute + 4) == ["first", "far", "second", "never"]


def test_short_inputs_join_a_long_one_only_if_padding_costs_less_than_a_pass():
    def passes(start_tokens):
        queue: BatchQueue[str] = BatchQueue(window_tokens=1_000, start_tokens=start_tokens)
        queue.put("mixed", [100, 10, 10], deadline=None)
        found = []
        while (batch := next_batch(queue)) is not None:
            found.append([i.tokens for i in batch.items])
        return found

    assert passes(start_tokens=179) == [[100, 10], [10]]
    assert passes(start_tokens=180) == [[100, 10, 10]]
    assert passes(start_tokens=0) == [[100], [10, 10]]


def test_lanes_share_the_window_by_guided_self_scheduling():
    def sizes(lanes):
        queue: BatchQueue[str] = BatchQueue(window_tokens=100, start_tokens=1, lanes=lanes)
        queue.put("one", [10] * 10, deadline=None)
        found = []
        while (batch := next_batch(queue)) is not None:
            found.append(len(batch.items))
        return found

    assert sizes(1) == [10]
    assert sizes(2) == [5, 2, 1, 1, 1]


def test_drain_returns_each_call_once_and_empties_the_queue():
    queue: BatchQueue[str] = BatchQueue(window_tokens=10)
    first = queue.put("first", [10, 10, 10], deadline=None)
    second = queue.put("second", [10], deadline=None)
    batch = next_batch(queue)
    assert batch is not None
    queue.requeue([batch])
    assert sorted(call.payload for call in queue.drain()) == ["first", "second"]
    assert first.is_discarded
    assert second.is_discarded
    assert next_batch(queue) is None
