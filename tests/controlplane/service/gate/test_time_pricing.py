"""Which generations that ended show that the device's time is short."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from backends.testing.scripted import ScriptedEmbedder
from controlplane.core.clock import Duration, Instant, milliseconds
from controlplane.core.decision import Outcome, Reason
from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.pool_view import Pace
from controlplane.core.request import Kind, Owner, Timeline
from controlplane.core.slo import Slo
from controlplane.service.gate.time_pricing import TimePricing
from controlplane.service.ticket import Rejected, Ticket
from tests.controlplane.service.scripted_bench import read
from tests.example_requests import a_request

END = Instant(milliseconds(5_000))
STEP = milliseconds(10)
PACE = Pace(STEP, milliseconds(1))


def an_estimator(pace: Pace | None = PACE, *, waited_share: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(pace_of=lambda model: pace, own_step=STEP, waited_share=waited_share)


def price(
    outcome: Outcome,
    *,
    memory: int = 0,
    running: int = 1,
    kind: Kind = Kind.GENERATE,
    outputs: int = 0,
    of_client: Duration | None = None,
    worst: int = 0,
    estimator: SimpleNamespace | None = None,
    **slo_ms: float,
) -> float:
    """The price after ten such requests of weight 1, with prompts of 100 tokens at 1 ms and 40 steps."""
    ledger = MemoryLedger({Owner.LLM: 1_000})
    for number in range(running):
        each = Footprint(memory // running, memory // running, 10)
        ledger.open(f"r{number}", Owner.LLM, each, priority=0)
    pricing = TimePricing(ledger, estimator or an_estimator())
    slo = Slo(**{part: milliseconds(value) for part, value in slo_ms.items()})
    for number in range(10):
        request = a_request(str(number), 100, 40, slo=slo, kind=kind)
        request = replace(request, slo=slo if of_client is None else replace(slo, tpot=of_client))
        timeline = Timeline(Instant(0))
        timeline.finished, timeline.output_tokens = END, outputs
        ticket = Ticket(request, Footprint(1, 1, 40, worst), None, timeline, None)
        ticket.outcome = outcome
        pricing.request_ended(ticket)
    return pricing.per_second(END)


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.REJECTED, Outcome.EVICTED])
def test_a_generation_that_missed_its_slo_beside_free_memory_lacked_time(outcome):
    # 0.1 s for the prompt and 40 steps of 10 ms.
    assert price(outcome, ttft=500) == pytest.approx(1 / 0.5)


def test_requests_that_decode_together_share_the_time_of_a_step():
    assert price(Outcome.LATE, ttft=500, running=4) == pytest.approx(1 / 0.2)


def test_an_output_longer_than_expected_takes_its_own_time():
    assert price(Outcome.LATE, ttft=500, outputs=90) == pytest.approx(1 / 1.0)


def test_a_request_that_memory_was_short_for_says_nothing_although_it_is_free_again():
    ledger = MemoryLedger({Owner.LLM: 1_000})
    pricing = TimePricing(ledger, an_estimator())
    lease = ledger.open("r", Owner.LLM, Footprint(600, 600, 10), priority=0)
    assert pricing.per_second(Instant(milliseconds(1_000))) == 0.0
    ledger.close(lease)
    prices = []
    for arrival_ms in (900, 1_100):
        request = a_request("0", 100, 40, slo=Slo(ttft=milliseconds(500)))
        request = replace(request, arrival=Instant(milliseconds(arrival_ms)))
        timeline = Timeline(request.arrival)
        timeline.finished = END
        ticket = Ticket(request, Footprint(1, 1, 40), None, timeline, None)
        ticket.outcome = Outcome.LATE
        pricing.request_ended(ticket)
        prices.append(pricing.per_second(END))
    assert prices[0] == 0.0 < prices[1]


@pytest.mark.parametrize(
    ("outcome", "case"),
    [
        (Outcome.MET, {"ttft": 500}),
        (Outcome.ABORTED, {"ttft": 500}),
        (Outcome.FAILED, {"ttft": 500}),
        (Outcome.LATE, {"ttft": 500, "of_client": milliseconds(1)}),
        (Outcome.REJECTED, {"ttft": 500, "worst": 1_001}),
        (Outcome.LATE, {}),
        (Outcome.LATE, {"ttft": 500, "memory": 600}),
        # The prompt alone takes longer than the retrieval before it has left.
        (Outcome.LATE, {"ttft": 90}),
        (Outcome.REJECTED, {"e2e": 450}),
        (Outcome.LATE, {"ttft": 500, "kind": Kind.EMBED}),
        (Outcome.LATE, {"ttft": 500, "estimator": an_estimator(None)}),
        (Outcome.LATE, {"ttft": 500, "estimator": an_estimator(waited_share=0.06)}),
    ],
    ids=[
        "met",
        "client left",
        "failed",
        "objective of the client",
        "never fits",
        "no slo",
        "memory",
        "ttft",
        "e2e",
        "embedding",
        "no pace",
        "the engine waits for passes",
    ],
)
def test_others_say_nothing_about_the_device(outcome, case):
    assert price(outcome, **case) == 0.0


def test_a_long_call_is_rejected_and_a_short_one_computed_while_chats_are_late(bench):
    """Chats take 0.1 s and 50 ms a token; of the calls one byte takes 10 ms."""
    chats = {"priority": 1, "default": True, "ttft_ms": 500, "tpot_ms": 20}
    classes = {"chats": chats, "documents": {"priority": 0, "e2e_ms": 5_000}}

    async def scenario(b):
        await b.embed("a" * 10, service_class="documents")
        for _ in range(3):
            await read(await b.ask(max_tokens=20))
        running = asyncio.create_task(read(await b.ask(max_tokens=20)))
        with pytest.raises(Rejected) as caught:
            await b.embed("a" * 300, service_class="documents")
        assert caught.value.reject.reason is Reason.DEVICE_TIME
        await b.embed("a" * 10, service_class="documents")
        await running
        # Without a generation beside it nothing is lost by it.
        await b.embed("a" * 300, service_class="documents")

    embedder = ScriptedEmbedder(token_seconds=0.01)
    outcomes = bench(scenario, embedder=embedder, classes=classes).outcomes
    assert outcomes == ["met", "late", "late", "late", "rejected", "met", "late", "met"]
