"""Each call completes exactly once with its own rows in order, whatever fails or dies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.embedding.batch_dispatcher import BatchDispatcher, PendingCall
from backends.embedding.ipc import PassResult
from controlplane.core.clock import Instant, seconds
from controlplane.core.errors import BackendDown, BackendFailed, NoMemory, WorkerDied
from tests.backends.embedding.dispatcher_harness import Harness, budget

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=10)
EVENTS = st.lists(st.sampled_from(["answer", "out of memory", "fail", "die"]), max_size=60)


@given(
    st.lists(st.tuples(LENGTHS, st.none() | st.integers(0, 9).map(Instant)), min_size=1, max_size=8),
    EVENTS, st.integers(1, 200), st.integers(1, 3), st.randoms(),
)  # fmt: skip
def test_every_call_completes_once_with_correct_rows(requested, events, tokens, lanes, random):
    harness = Harness(tokens, lanes)
    for lengths, deadline in requested:
        harness.submit(lengths, deadline)
    deaths = 0
    for event in events:
        harness.send()
        if not harness.sent:
            break
        number = random.choice(list(harness.sent))
        if event == "answer":
            harness.answer(number)
        elif event == "die":
            deaths += 1
            harness.sent.clear()
            harness.dispatcher.worker_died("it died", was_killed=random.random() < 0.5)
            harness.dispatcher.worker_started(budget(tokens, lanes))
        else:
            del harness.sent[number]
            harness.dispatcher.pass_failed(number, event, is_out_of_memory=event == "out of memory")
    harness.finish()
    for number, (completed, (lengths, _)) in enumerate(zip(harness.completed, requested, strict=True)):
        assert len(completed) == 1
        absent = harness.rows[number][:, 1] < 0
        assert harness.calls[number].payload.tokens == np.array(lengths)[absent].sum()
        if completed[0] is None:
            expected = [[100 * number + i, n] for i, n in enumerate(lengths)]
            assert harness.rows[number].tolist() == expected
        else:
            assert isinstance(completed[0], BackendDown | BackendFailed)
            assert deaths > 1 or isinstance(completed[0], BackendFailed)


@pytest.mark.parametrize("at", range(6))
def test_out_of_memory_at_any_batch_loses_no_rows(at):
    harness = Harness(40)
    harness.submit([10] * 20)
    harness.send()
    for step in range(100):
        if not harness.sent:
            break
        number = min(harness.sent)
        if step == at:
            assert len(harness.sent.pop(number)) == 4
            harness.dispatcher.pass_failed(number, "no memory", is_out_of_memory=True)
            assert harness.dispatcher.budget.tokens == 20
        else:
            harness.answer(number)
        harness.send()
    assert harness.completed == [[None]]
    assert harness.rows[0][:, 0].tolist() == list(range(20))


def test_a_failing_input_fails_only_its_own_call():
    harness = Harness(1_000)
    harness.submit([10, 10])
    harness.submit([10, 10])
    harness.submit([10])
    poison = 101
    harness.send()
    while harness.sent:
        number, inputs = next(iter(harness.sent.items()))
        if any(ids[0] == poison for ids in inputs):
            del harness.sent[number]
            harness.dispatcher.pass_failed(number, "bad input", is_out_of_memory=False)
        else:
            harness.answer(number)
        harness.send()
    [[first], [second], [third]] = harness.completed
    assert (first, third) == (None, None)
    assert isinstance(second, BackendFailed)
    assert str(second) == "input 1: bad input"


def test_a_second_worker_death_fails_only_the_call_that_was_in_flight_both_times():
    harness = Harness(10)
    harness.dispatcher.restart_seconds = 3.0
    for _ in range(4):
        harness.submit([10])
    for _ in range(2):
        harness.send()
        harness.dispatcher.worker_died("worker 7 died")
        harness.dispatcher.worker_started(budget(10))
    harness.sent.clear()
    [[error], *others] = harness.completed
    assert isinstance(error, WorkerDied) and (str(error), error.retry_after) == ("worker 7 died", 3.0)
    assert others == [[]] * 3
    harness.finish()
    assert harness.completed[1:] == [[None]] * 3


@pytest.mark.parametrize("lanes", [1, 2])
def test_of_calls_in_one_pass_only_the_one_that_ends_workers_fails(lanes: int):
    harness = Harness(1_000, lanes)
    for _ in range(9):
        harness.submit([10] * 3)
    deadly, deaths = 401, 0
    while harness.send() or harness.sent:
        if not any(deadly in [ids[0] for ids in inputs] for inputs in harness.sent.values()):
            harness.answer(next(iter(harness.sent)))
        else:
            deaths += 1
            harness.sent.clear()
            harness.dispatcher.worker_died("worker 7 died")
            harness.dispatcher.worker_started(budget(1_000, lanes))
    [failed] = harness.completed.pop(4)
    assert isinstance(failed, WorkerDied) and deaths == 2
    assert harness.completed == [[None]] * 8


def test_a_worker_broken_by_a_batch_costs_other_calls_no_retry():
    harness = Harness(40, lanes=2)
    for _ in range(6):
        harness.submit([10] * 4)
    poison, broken = 503, 0
    while True:
        harness.send()
        if not harness.sent:
            break
        number = next((n for n, inputs in harness.sent.items() if poison in [i[0] for i in inputs]), None)
        if number is None:
            harness.answer(min(harness.sent))
            continue
        harness.sent.clear()
        harness.dispatcher.pass_failed(number, "bad input", is_out_of_memory=False)
        harness.dispatcher.worker_died("it ended", failure_reported=True)
        harness.dispatcher.worker_started(budget(40, lanes=2))
        broken += 1
    assert broken == 3
    assert [type(*completed) for completed in harness.completed] == [type(None)] * 5 + [BackendFailed]


def test_batches_of_a_killed_worker_are_retried_in_halves():
    harness = Harness(80)
    harness.submit([10] * 16)
    harness.send()
    assert [len(inputs) for inputs in harness.sent.values()] == [8, 8]
    harness.sent.clear()
    harness.dispatcher.worker_died("it was killed", was_killed=True)
    harness.dispatcher.worker_started(budget(80))
    assert (harness.dispatcher.budget.tokens, harness.dispatcher.out_of_memory) == (40, 1)
    harness.send()
    assert [len(inputs) for inputs in harness.sent.values()] == [4, 4]
    harness.finish()
    assert harness.completed == [[None]]
    assert harness.rows[0][:, 0].tolist() == list(range(16))


def test_one_batch_per_lane_and_one_spare_are_sent():
    harness = Harness(10, lanes=2)
    harness.submit([10] * 9)
    harness.send()
    assert len(harness.sent) == 3


def test_small_batches_wait_until_a_lane_is_free():
    harness = Harness(1_000, lanes=2)
    harness.submit([10])
    harness.send(starts_small=False)
    assert not harness.sent
    for _ in range(4):
        harness.send()
        harness.submit([10])
    assert [len(inputs) for inputs in harness.sent.values()] == [1, 1]
    harness.answer(1)
    harness.send()
    assert [len(inputs) for inputs in harness.sent.values()] == [1, 3]
    # Tokens worth eight pass starts: waiting for more inputs would gain little.
    harness.submit([10] * 8)
    harness.send(starts_small=False)
    assert [len(inputs) for inputs in harness.sent.values()] == [1, 3, 8]


def test_a_single_input_out_of_memory_is_retried_once_alone():
    harness = Harness(10, lanes=2)
    for _ in range(5):
        harness.submit([10])
    harness.send()
    for number in (1, 2):
        harness.sent.pop(number)
        harness.dispatcher.pass_failed(number, "no memory", is_out_of_memory=True)
        harness.send()
    assert list(harness.sent) == [3]
    harness.answer(3)
    harness.send()
    assert list(harness.sent) == [4]
    harness.answer(4)
    harness.send()
    harness.sent.pop(5)
    harness.dispatcher.pass_failed(5, "no memory", is_out_of_memory=True)
    harness.finish()
    [failure] = harness.completed.pop(1)
    assert isinstance(failure, NoMemory)
    assert failure.position == 0
    assert harness.completed == [[None]] * 4


def test_batches_wait_until_the_byte_budget_allows_them():
    harness = Harness(1_000)
    harness.dispatcher.budget.bytes = 150
    harness.submit([10] * 3)
    harness.send()
    assert [len(inputs) for inputs in harness.sent.values()] == [1, 1]
    assert harness.dispatcher.budget.bytes >= 10 * 10 + 8


def test_fail_all_completes_every_call():
    harness = Harness(10)
    harness.submit([10] * 3)
    harness.submit([5])
    harness.send()
    harness.dispatcher.pass_failed(1, "no memory", is_out_of_memory=True)
    harness.dispatcher.fail_all("stopped")
    assert [str(*completed) for completed in harness.completed] == ["stopped"] * 2
    harness.send()
    assert len(harness.sent) == 2


@pytest.mark.parametrize("ends", ["fails", "is given up"])
def test_idle_time_after_a_pass_without_a_result_is_no_service_time(ends):
    """With a minute per token all calls would be late, and the largest of them would go last."""
    dispatcher = Harness(1_000).dispatcher
    minute = seconds(60)
    for at in (0, minute, 2 * minute):
        pending = PendingCall([np.full(10, 1, dtype=np.uint32)], np.zeros((1, 2), dtype=np.float32), repr)
        dispatcher.put(pending, deadline=None)
        number, _ = dispatcher.next_batch(None, Instant(at))
        if at == minute:
            result = PassResult(np.zeros((1, 2), dtype=np.float32), seconds(0.01), 0)
            dispatcher.pass_finished(number, result, Instant(at + seconds(0.01)))
        elif ends == "fails":
            dispatcher.pass_failed(number, "no such input", is_out_of_memory=False)
        else:
            dispatcher.fail_all("no worker")
    assert dispatcher._rate.ns_per_token == seconds(0.001)


def test_a_pass_above_the_estimate_raises_the_memory_model():
    harness = Harness(100)
    harness.submit([10] * 10)
    harness.send()
    number = next(iter(harness.sent))
    before = harness.dispatcher.budget.memory.pass_bytes(10, 10)
    rows = np.zeros((10, 2), dtype=np.float32)
    harness.dispatcher.pass_finished(number, PassResult(rows, 1_000_000, 2 * before), Instant(0))
    assert harness.dispatcher.budget.memory.pass_bytes(10, 10) == 2 * before


def test_expected_seconds_in_flight_sum_over_batches():
    harness = Harness(40, lanes=2)
    assert harness.dispatcher.expected_seconds_in_flight == 0
    harness.submit([40, 40])
    harness.send()
    assert harness.dispatcher.expected_seconds_in_flight == pytest.approx(0.002 + 1e-4 * 80)
    harness.answer(next(iter(harness.sent)))
    assert 0 < harness.dispatcher.expected_seconds_in_flight < 0.01
    harness.finish()
    assert harness.dispatcher.expected_seconds_in_flight == 0
    assert BatchDispatcher().expected_seconds_in_flight == 0
