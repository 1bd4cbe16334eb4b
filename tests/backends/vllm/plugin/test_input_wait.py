"""A scheduler in no hurry is woken by what arrives. Were it not, these would stand still for a minute."""

from queue import Queue
from threading import Thread
from time import monotonic_ns

from backends.vllm.plugin.input_wait import wait_for_input
from controlplane.core.clock import seconds


def test_what_is_there_already_is_not_waited_for():
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


def test_without_arrivals_the_time_is_waited_out():
    for inputs in (Queue(), None):
        began = monotonic_ns()
        wait_for_input(inputs, seconds(0.001))
        assert monotonic_ns() - began >= seconds(0.001)
