"""An admitted embedding call evicted for a smaller one raises Rejected and holds nothing."""

import asyncio

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.core.decision import Outcome, Reason, Reject
from controlplane.core.errors import BackendFailed
from controlplane.core.memory_ledger import Footprint
from controlplane.core.request import Kind, Timeline
from controlplane.service.ticket import Rejected, Ticket
from tests.example_requests import a_request

CLASSES = {"documents": {"e2e_ms": 2_000, "default": True}}


def slow() -> ScriptedEmbedder:
    """One byte is one token, and takes 10 ms."""
    return ScriptedEmbedder(token_seconds=0.01, max_running=1)


async def embedding(b, name: str, size: int):
    return await b.embed("a" * size, name=name)


def test_the_larger_of_two_conflicting_calls_is_evicted_at_once(bench):
    async def scenario(b):
        computing = asyncio.create_task(embedding(b, "large", 120))
        await b.embedder.until_runs(1)
        start = asyncio.get_running_loop().time()
        small = asyncio.create_task(embedding(b, "small", 90))
        with pytest.raises(Rejected) as caught:
            await computing
        assert asyncio.get_running_loop().time() == start
        assert caught.value.reject.reason is Reason.SLO_UNATTAINABLE
        assert caught.value.reject.retry_after is not None
        assert caught.value.is_evicted
        assert b.embedder.aborted == ["large-1"]
        assert (await small).vectors.shape == (1, 8)

    assert sorted(bench(scenario, embedder=slow(), classes=CLASSES).outcomes) == ["evicted", "met"]


def ticket_with_its_turn() -> Ticket:
    request = a_request(kind=Kind.EMBED)
    ticket = Ticket(request, Footprint(1), None, Timeline(request.arrival))
    ticket.granted.set_result(None)
    return ticket


def evict(ticket: Ticket) -> None:
    ticket.outcome = Outcome.EVICTED
    ticket.reject(Reject(Reason.SLO_UNATTAINABLE, None))


async def test_a_refused_ticket_opens_no_call():
    """It was evicted between its grant and its start."""
    evict(ticket := ticket_with_its_turn())
    with pytest.raises(Rejected):
        async with ticket.revocable():
            pytest.fail("it was refused")


@pytest.mark.parametrize("failure", [None, BackendFailed("just now")])
async def test_an_evicted_call_raises_rejected_even_if_it_returned_in_the_same_iteration(failure):
    """With the vectors its caller would see another outcome than the one that was counted."""
    ticket = ticket_with_its_turn()
    with pytest.raises(Rejected):
        async with ticket.revocable():
            evict(ticket)
            if failure is not None:
                raise failure


async def test_a_call_that_is_not_refused_fails_as_it_failed():
    with pytest.raises(TimeoutError):
        async with ticket_with_its_turn().revocable():
            raise TimeoutError
