"""A delayed step is woken by an arriving message; otherwise these tests would wait for a minute."""

from queue import Queue
from threading import Thread
from time import monotonic_ns

from backends.vllm.plugin.input_wait import wait_for_input
from controlplane.core.clock import seconds


def test_a_queued_message_ends_the_wait_at_once():
    inputs = Queue()
    inputs.put("request")
    wait_for_input(inputs, seconds(60))
    assert inputs.get_nowait() == "request"


def test_an_arrival_ends_the_wait():
    inputs = Queue()
    waiter = Thread(target=wait_for_input, args=(inputs, seconds(60)))
    waiter.start()
    inputs.put("request")
    waiter.join(30)
    assert not waiter.is_alive()


def test_without_arrivals_the_wait_lasts_its_full_time():
    for inputs in (Queue(), None):
        began = monotonic_ns()
        wait_for_input(inputs, seconds(0.001))
        assert monotonic_ns() - began >= seconds(0.001)


def test_the_end_of_a_pass_ends_the_wait():
    states = iter([False, False, True])
    wait_for_input(Queue(), seconds(60), lambda: next(states))
    assert list(states) == []
