"""Whatever fails or dies on the way, each call is settled once and its rows are its own, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.batch_dispatch import BatchDispatcher, PendingCall
from backends.embedding.budget import PassBudget
from backends.embedding.ipc import PassResult
from backends.embedding.memory_model import EmbeddingMemory
from backends.embedding.time_model import ObservedTime, PassTime
from controlplane.core.clock import Instant
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory


def budget(tokens: int, lanes: int = 1) -> PassBudget:
    memory = EmbeddingMemory(0, 10.0, 2, is_measured=True)
    return PassBudget(tokens, lanes, memory, ObservedTime(PassTime(0.001, 1e-4, 0.0)))


class Desk:
    """Callers, and a worker that answers each input with (its first id, its length)."""

    def __init__(self, tokens: int, lanes: int = 1) -> None:
        self.dispatcher = BatchDispatcher()
        self.dispatcher.worker_started(budget(tokens, lanes))
        self.rows: list[np.ndarray] = []
        self.calls = []
        self.settled: list[list[Exception | None]] = []
        self.sent: dict[int, list[np.ndarray]] = {}

    def ask(self, lengths: list[int], deadline: Instant | None = None) -> None:
        number = len(self.rows)
        inputs = [np.full(n, 100 * number + i, dtype=np.uint32) for i, n in enumerate(lengths)]
        rows, settled = np.full((len(lengths), 2), -1, dtype=np.float32), []
        self.rows.append(rows)
        self.settled.append(settled)
        caller = PendingCall(inputs, rows, settled.append)
        self.calls.append(self.dispatcher.put(caller, deadline=deadline))

    def feed(self, limit: float | None = None, *, starts_small: bool = True) -> None:
        while (sent := self.dispatcher.next_batch(limit, Instant(0), starts_small=starts_small)) is not None:
            self.sent[sent[0]] = sent[1]

    def answer(self, number: int) -> None:
        inputs = self.sent.pop(number)
        rows = np.array([[ids[0], len(ids)] for ids in inputs], dtype=np.float32)
        self.dispatcher.pass_finished(number, PassResult(rows, 1_000_000, 0), Instant(0))

    def finish(self) -> None:
        self.feed()
        while self.sent:
            self.answer(next(iter(self.sent)))
            self.feed()


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=10)
EVENTS = st.lists(st.sampled_from(["answer", "out of memory", "fail", "die"]), max_size=60)


@given(
    st.lists(st.tuples(LENGTHS, st.none() | st.integers(0, 9).map(Instant)), min_size=1, max_size=8),
    EVENTS, st.integers(1, 200), st.integers(1, 3), st.randoms(),
)  # fmt: skip
def test_every_call_is_settled_once_and_a_row_that_came_is_right(asked, events, tokens, lanes, random):
    desk = Desk(tokens, lanes)
    for lengths, deadline in asked:
        desk.ask(lengths, deadline)
    deaths = 0
    for event in events:
        desk.feed()
        if not desk.sent:
            break
        number = random.choice(list(desk.sent))
        if event == "answer":
            desk.answer(number)
        elif event == "die":
            deaths += 1
            desk.sent.clear()
            desk.dispatcher.worker_died("it died", was_killed=random.random() < 0.5)
            desk.dispatcher.worker_started(budget(tokens, lanes))
        else:
            del desk.sent[number]
            desk.dispatcher.pass_failed(number, event, is_out_of_memory=event == "out of memory")
    desk.finish()
    for number, (settled, (lengths, _)) in enumerate(zip(desk.settled, asked, strict=True)):
        assert len(settled) == 1
        absent = desk.rows[number][:, 1] < 0
        assert desk.calls[number].caller.tokens == np.array(lengths)[absent].sum()
        if settled[0] is None:
            expected = [[100 * number + i, n] for i, n in enumerate(lengths)]
            assert desk.rows[number].tolist() == expected
        else:
            assert isinstance(settled[0], BackendDown | BackendFailed)
            assert deaths > 1 or isinstance(settled[0], BackendFailed)


@pytest.mark.parametrize("at", range(6))
def test_one_out_of_memory_at_any_batch_loses_nothing(at):
    desk = Desk(40)
    desk.ask([10] * 20)
    desk.feed()
    for turn in range(100):
        if not desk.sent:
            break
        number = min(desk.sent)
        if turn == at:
            assert len(desk.sent.pop(number)) == 4
            desk.dispatcher.pass_failed(number, "no memory", is_out_of_memory=True)
            assert desk.dispatcher.budget.tokens == 20
        else:
            desk.answer(number)
        desk.feed()
    assert desk.settled == [[None]]
    assert desk.rows[0][:, 0].tolist() == list(range(20))


def test_an_input_that_always_fails_takes_only_its_own_call_with_it():
    desk = Desk(1_000)
    desk.ask([10, 10])
    desk.ask([10, 10])
    desk.ask([10])
    poison = 101
    desk.feed()
    while desk.sent:
        number, inputs = next(iter(desk.sent.items()))
        if any(ids[0] == poison for ids in inputs):
            del desk.sent[number]
            desk.dispatcher.pass_failed(number, "bad input", is_out_of_memory=False)
        else:
            desk.answer(number)
        desk.feed()
    [[first], [second], [third]] = desk.settled
    assert (first, third) == (None, None)
    assert isinstance(second, BackendFailed)
    assert str(second) == "input 1: bad input"


def test_a_second_death_fails_what_was_under_way_twice_and_nothing_else():
    desk = Desk(10)
    desk.dispatcher.restart_seconds = 3.0
    for _ in range(4):
        desk.ask([10])
    for _ in range(2):
        desk.feed()
        desk.dispatcher.worker_died("worker 7 died")
        desk.dispatcher.worker_started(budget(10))
    desk.sent.clear()
    told = [error for settled in desk.settled[:2] for error in settled]
    assert [(str(error), error.retry_after) for error in told] == [("worker 7 died", 3.0)] * 2
    desk.finish()
    assert desk.settled[2:] == [[None], [None]]


def test_a_worker_that_a_batch_breaks_costs_nobody_else_a_try():
    desk = Desk(40, lanes=2)
    for _ in range(6):
        desk.ask([10] * 4)
    poison, broken = 503, 0
    while True:
        desk.feed()
        if not desk.sent:
            break
        number = next((n for n, inputs in desk.sent.items() if poison in [i[0] for i in inputs]), None)
        if number is None:
            desk.answer(min(desk.sent))
            continue
        desk.sent.clear()
        desk.dispatcher.pass_failed(number, "bad input", is_out_of_memory=False)
        desk.dispatcher.worker_died("it ended", failure_reported=True)
        desk.dispatcher.worker_started(budget(40, lanes=2))
        broken += 1
    assert broken == 3
    assert [type(*settled) for settled in desk.settled] == [type(None)] * 5 + [BackendFailed]


def test_what_a_killed_worker_had_is_tried_again_in_halves():
    desk = Desk(80)
    desk.ask([10] * 16)
    desk.feed()
    assert [len(inputs) for inputs in desk.sent.values()] == [8, 8]
    desk.sent.clear()
    desk.dispatcher.worker_died("it was killed", was_killed=True)
    desk.dispatcher.worker_started(budget(80))
    assert (desk.dispatcher.budget.tokens, desk.dispatcher.out_of_memory) == (40, 1)
    desk.feed()
    assert [len(inputs) for inputs in desk.sent.values()] == [4, 4]
    desk.finish()
    assert desk.settled == [[None]]
    assert desk.rows[0][:, 0].tolist() == list(range(16))


def test_one_batch_a_lane_is_computed_and_one_lies_ready():
    desk = Desk(10, lanes=2)
    desk.ask([10] * 9)
    desk.feed()
    assert len(desk.sent) == 3


def test_what_is_not_worth_a_pass_waits_for_company_until_a_lane_is_free():
    desk = Desk(1_000, lanes=2)
    desk.ask([10])
    desk.feed(starts_small=False)
    assert not desk.sent
    for _ in range(4):
        desk.feed()
        desk.ask([10])
    assert [len(inputs) for inputs in desk.sent.values()] == [1, 1]
    desk.answer(1)
    desk.feed()
    assert [len(inputs) for inputs in desk.sent.values()] == [1, 3]
    # Eight starts' worth: more company would hardly cheapen it.
    desk.ask([10] * 8)
    desk.feed(starts_small=False)
    assert [len(inputs) for inputs in desk.sent.values()] == [1, 3, 8]


def test_a_single_input_without_memory_is_tried_once_more_with_nothing_beside_it():
    desk = Desk(10, lanes=2)
    for _ in range(5):
        desk.ask([10])
    desk.feed()
    for number in (1, 2):
        desk.sent.pop(number)
        desk.dispatcher.pass_failed(number, "no memory", is_out_of_memory=True)
        desk.feed()
    assert list(desk.sent) == [3]
    desk.answer(3)
    desk.feed()
    assert list(desk.sent) == [4]
    desk.answer(4)
    desk.feed()
    desk.sent.pop(5)
    desk.dispatcher.pass_failed(5, "no memory", is_out_of_memory=True)
    desk.finish()
    [failure] = desk.settled.pop(1)
    assert isinstance(failure, NoMemory)
    assert failure.position == 0
    assert desk.settled == [[None]] * 4


def test_a_time_limit_cuts_batches_and_ends_with_its_cause():
    desk = Desk(1_000)
    desk.ask([10] * 40)
    desk.feed(limit=0.0061)
    assert [len(inputs) for inputs in desk.sent.values()] == [5, 5]
    for number in list(desk.sent):
        desk.answer(number)
    desk.dispatcher.budget.time.scale = 1.0
    desk.feed()
    assert max(len(inputs) for inputs in desk.sent.values()) > 5


def test_batches_within_the_bytes_wait_for_each_other():
    desk = Desk(1_000)
    desk.dispatcher.budget.bytes = 150
    desk.ask([10] * 3)
    desk.feed()
    assert [len(inputs) for inputs in desk.sent.values()] == [1, 1]
    assert desk.dispatcher.budget.bytes >= 10 * 10 + 8


def test_giving_up_settles_everyone():
    desk = Desk(10)
    desk.ask([10] * 3)
    desk.ask([5])
    desk.feed()
    desk.dispatcher.pass_failed(1, "no memory", is_out_of_memory=True)
    desk.dispatcher.fail_all("stopped")
    assert [str(*settled) for settled in desk.settled] == ["stopped"] * 2
    desk.feed()
    assert len(desk.sent) == 2


def test_a_pass_that_took_more_memory_steepens_the_model():
    desk = Desk(100)
    desk.ask([10] * 10)
    desk.feed()
    number = next(iter(desk.sent))
    before = desk.dispatcher.budget.memory.pass_bytes(10, 10)
    rows = np.zeros((10, 2), dtype=np.float32)
    desk.dispatcher.pass_finished(number, PassResult(rows, 1_000_000, 2 * before), Instant(0))
    assert desk.dispatcher.budget.memory.pass_bytes(10, 10) == 2 * before


def test_what_is_under_way_should_take_the_time_of_its_passes():
    desk = Desk(40, lanes=2)
    assert desk.dispatcher.expected_seconds_in_flight == 0
    desk.ask([40, 40])
    desk.feed()
    assert desk.dispatcher.expected_seconds_in_flight == pytest.approx(0.002 + 1e-4 * 80)
    desk.answer(next(iter(desk.sent)))
    assert 0 < desk.dispatcher.expected_seconds_in_flight < 0.01
    desk.finish()
    assert desk.dispatcher.expected_seconds_in_flight == 0
    assert BatchDispatcher().expected_seconds_in_flight == 0
