"""What a pass may cost, how long it may take, and how its inputs are ordered by urgency."""

import numpy as np
import pytest

from backends.embedding.ipc import PassResult
from controlplane.core.clock import Instant, seconds
from tests.backends.embedding.dispatcher_harness import Harness


def test_a_cost_shortens_the_pass_to_what_it_is_worth_and_keeps_it_off_a_busy_lane():
    harness = Harness(1_000)
    harness.submit([10] * 40, deadline=Instant(seconds(0.1)))

    harness.send(lambda pauses: [1.0 * (pause > 0.0061) for pause in pauses])
    assert [len(inputs) for inputs in harness.sent.values()] == [5], "41 of 100 ms are worth less than an SLO"
    harness.answer(1)
    harness.dispatcher.budget.time.scale = 1.0
    harness.send(lambda pauses: [2.0] * len(pauses))
    assert harness.sent == {}
    assert harness.dispatcher.has_withheld_calls
    harness.send()
    assert max(len(inputs) for inputs in harness.sent.values()) > 5


def test_no_pass_takes_more_than_a_quarter_of_the_shortest_objective():
    """A pass of n inputs of 10 tokens takes 1 + n ms."""
    harness = Harness(10_000)
    harness.submit([10] * 100)
    harness.dispatcher.longest_pass.record(seconds(0.1))
    harness.send()
    assert len(harness.sent.popitem()[1]) == 24


def test_calls_are_worth_more_where_passes_have_taken_longer_than_predicted():
    harness = Harness(1_000)
    harness.submit([10] * 20, deadline=Instant(seconds(0.1)))
    harness.send(lambda pauses: [0.3] * len(pauses))
    assert harness.sent == {}, "21 of 100 ms"
    harness.dispatcher.budget.time.caution = 2.0
    harness.send(lambda pauses: [0.3] * len(pauses))
    assert [len(inputs) for inputs in harness.sent.values()] == [20]


def test_the_wait_for_a_result_is_learned_except_behind_another_pass():
    harness = Harness(50)
    harness.submit([10] * 30)
    harness.send()
    assert list(harness.sent) == [1, 2], "one is sent ahead"
    rows = np.zeros((5, 2), dtype=np.float32)
    for number in (1, 2):
        result = PassResult(rows, 6_000_000, 0)
        harness.dispatcher.pass_finished(number, result, Instant(seconds(0.03 * number)))
        assert harness.dispatcher.budget.time.caution == pytest.approx(5.0), "30 for 6 ms"


def test_work_needs_the_cpu_when_half_of_the_time_to_its_deadline_is_left_or_it_starves():
    harness = Harness(1_000)
    assert harness.dispatcher.latest_start(Instant(0)) is None
    harness.submit([10], deadline=Instant(seconds(0.1)))
    harness.submit([30], deadline=Instant(seconds(0.05)))
    harness.submit([10], deadline=Instant(seconds(0.001)))
    assert harness.dispatcher.latest_start(Instant(0)) == seconds(0.05 - 2 * 0.006), "the third must be late"
    harness.dispatcher.cancel(harness.calls[1])
    harness.dispatcher.cancel(harness.calls[2])
    assert harness.dispatcher.latest_start(Instant(0)) == seconds(0.1 - 2 * 0.002)
    harness.send()
    assert harness.dispatcher.latest_start(Instant(0)) == seconds(4 * 0.002 + 0.05)
    harness.answer(1)
    assert harness.dispatcher.latest_start(Instant(0)) is None


def test_handover_is_the_time_of_a_pass_that_its_worker_did_not_compute():
    harness = Harness(100)
    harness.submit([10] * 20)
    harness.send()
    assert len(harness.sent) == 2, "one is computed and one was sent ahead"
    result = PassResult(np.zeros((10, 2), dtype=np.float32), seconds(0.003), 0)
    finished = [
        harness.dispatcher.pass_finished(number, result, Instant(seconds(0.004))) for number in (1, 2)
    ]
    assert [done.handover for done in finished] == [seconds(0.001), 0]
    assert [done.priced for done in finished] == [None, None]


def test_a_pass_with_a_cost_states_the_time_by_which_it_was_weighed():
    harness = Harness(100)
    harness.submit([10] * 3, deadline=Instant(seconds(0.005)))
    harness.send(lambda pauses: [0.0] * len(pauses))
    result = PassResult(np.zeros((3, 2), dtype=np.float32), seconds(0.002), 0)
    done = harness.dispatcher.pass_finished(1, result, Instant(seconds(0.003)))
    assert done.priced == seconds(0.004), "1 ms and 0.1 ms per token"


def test_a_pass_of_a_more_urgent_call_takes_its_inputs_first():
    harness = Harness(1_000)
    harness.submit([20] * 4)
    harness.submit([18] * 2, deadline=Instant(seconds(0.1)))
    harness.send(lambda pauses: [9.0 * (pause > 0.0047) for pause in pauses])
    assert [len(ids) for ids in harness.sent[1]] == [18, 18]
