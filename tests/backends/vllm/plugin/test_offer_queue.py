"""The queues that replace vLLM's: no request waits where the policy does not see it."""

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]


@pytest.fixture
def queues():
    """A waiting queue and the queue of skipped requests beside it, and what the policy was told."""
    from backends.vllm.plugin.offer_queue import OfferQueue, SkippedQueue

    told: list[tuple[str, str]] = []
    waiting = OfferQueue(
        lambda request: told.append(("joined", request.request_id)),
        lambda request: told.append(("left", request.request_id)),
    )
    return waiting, SkippedQueue(waiting), told


def test_a_blocked_request_waits_where_the_policy_sees_it(queues) -> None:
    """vLLM 0.26 to 0.30 add a request whose grammar is not compiled to the skipped ones."""
    waiting, skipped, told = queues
    skipped.add_request(SimpleNamespace(request_id="a"))
    assert told == [("joined", "a")]
    assert [request.request_id for request in waiting] == ["a"]
    assert (bool(skipped), len(skipped), list(skipped)) == (False, 0, [])


def test_a_request_that_a_step_skipped_is_offered_again(queues) -> None:
    waiting, skipped, told = queues
    first, second = (SimpleNamespace(request_id=name) for name in "ab")
    waiting.add_request(first)
    waiting.add_request(second)
    waiting.open([first, second])
    step_skipped = [waiting.pop_request()]
    assert waiting.pop_request() is second
    skipped.prepend_requests(step_skipped)
    assert not waiting, "it is offered in the next step, not again in this one"
    waiting.close()
    assert [request.request_id for request in waiting] == ["a"]
    assert told[2:] == [("left", "a"), ("left", "b"), ("joined", "a")]


def test_removing_from_both_queues_removes_once(queues) -> None:
    waiting, skipped, told = queues
    request = SimpleNamespace(request_id="a")
    waiting.add_request(request)
    for queue in (waiting, skipped):
        queue.remove_requests([request])
    assert told == [("joined", "a"), ("left", "a")]
    with pytest.raises(IndexError):
        skipped.pop_request()
