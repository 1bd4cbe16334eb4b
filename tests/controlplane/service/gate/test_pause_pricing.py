"""What a pause of the engine costs the requests that run or wait in it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from controlplane.core.clock import Instant, milliseconds
from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.pool_view import Pace
from controlplane.core.request import Owner, Timeline
from controlplane.core.slo import Slo
from controlplane.service.gate.pause_pricing import PausePricing
from controlplane.service.ticket import Ticket
from tests.example_requests import a_request

NOW = Instant(milliseconds(10))


class Bench:
    """Requests in an engine with steps of 10 ms and 0.1 ms per prompt token."""

    def __init__(self, *, prefill_share: float = 0.0) -> None:
        self.ledger = MemoryLedger({Owner.LLM: 1_000})
        self.estimator = SimpleNamespace(
            pace=Pace(milliseconds(10), milliseconds(0.1)),
            own_step=milliseconds(10),
            prefill_share=prefill_share,
            pass_delay=1.0,
        )
        self.tickets: dict[str, Ticket] = {}
        self.waiting: list[Ticket] = []
        engine = SimpleNamespace(has_started=lambda ticket: ticket not in self.waiting)
        self.pricing = PausePricing(self.tickets, self.ledger, self.estimator, engine)

    def add(self, prompt_tokens: int, *, cached: int = 0, outputs: int = 0, **slo_ms: float) -> None:
        slo = Slo(**{part: milliseconds(value) for part, value in slo_ms.items()})
        request = a_request(str(len(self.tickets)), prompt_tokens, 100, slo=slo, cached_tokens=cached)
        timeline = Timeline(Instant(0))
        if outputs:
            timeline.first_token = timeline.last_token = NOW
            timeline.output_tokens = outputs
        ticket = Ticket(request, Footprint(1, 1, 10), None, timeline, None)
        ticket.lease = self.ledger.open(request.id, Owner.LLM, ticket.footprint, priority=0)
        self.tickets[request.id] = ticket

    def cost(self, *pauses_ms: float) -> list[float]:
        found = self.pricing.cost(NOW)
        assert found is not None
        return found([pause / 1e3 for pause in pauses_ms])


def test_nothing_that_runs_means_no_cost():
    assert Bench().pricing.cost(NOW) is None


def test_a_first_token_needs_its_prompt_and_those_before_it():
    bench = Bench()
    bench.add(200)
    bench.add(300, cached=100, ttft=100)
    # Of 100 ms, 10 have passed, 200 + 200 prompt tokens take 40 ms and the step 10 ms.
    assert bench.cost(39, 41) == pytest.approx([0.0, 1.0])


def test_a_pause_delays_those_that_wait_for_a_place_by_their_part_of_the_time_left():
    bench = Bench()
    bench.add(200, ttft=130)
    bench.waiting = list(bench.tickets.values())
    # Of 130 ms, 10 have passed; the prompt takes 20 ms and the step 10 ms, so 90 ms may be waited.
    assert bench.cost(9, 45, 200) == pytest.approx([0.3 * 0.1, 0.3 * 0.5, 1.0])
    bench.add(900, ttft=50)
    bench.waiting = list(bench.tickets.values())
    assert bench.cost(9) == pytest.approx([0.3 * 0.1]), "the second is late in any case"


def test_prompts_that_have_been_computed_delay_no_first_token():
    bench = Bench()
    bench.add(900, outputs=3)
    bench.add(200, ttft=100)
    assert bench.cost(59, 61) == pytest.approx([0.0, 1.0])


def test_a_pause_is_as_long_as_the_prompts_that_arrive_meanwhile_make_it():
    bench = Bench(prefill_share=0.5)
    bench.add(200, ttft=100)
    # The step takes 20 ms with its share of prefills, and each ms of a pause delays by two.
    assert bench.cost(24, 26) == pytest.approx([0.0, 1.0])


def test_a_pass_that_runs_beside_the_steps_costs_what_it_delays_them():
    bench = Bench()
    bench.estimator.pass_delay = 0.25
    bench.add(200, ttft=100)
    # Of 100 ms, 10 have passed, the prompt takes 20 ms and the step 10 ms.
    assert bench.cost(236, 244) == pytest.approx([0.0, 1.0])


def test_a_pause_costs_those_to_come_that_cannot_wait_for_its_end():
    bench = Bench()
    bench.add(200, outputs=3)
    bench.add(200, outputs=3, ttft=80)
    assert bench.cost(100) == [0.0]
    running, admitted = bench.tickets.values()
    for _ in range(20):
        bench.pricing.admitted(running, Instant(0))
        bench.pricing.admitted(admitted, Instant(0))
    # 20 have come in 10 ms. Of 80 ms each needs 20 for its prompt and 10 for the step.
    assert bench.cost(50, 51) == pytest.approx([0.0, 2.0])


def test_a_client_that_states_a_shorter_time_to_the_first_token_makes_no_pass_dearer():
    bench = Bench()
    bench.add(200, outputs=3, ttft=80)
    (ticket,) = bench.tickets.values()
    ticket.request = replace(ticket.request, slo=replace(ticket.request.slo, ttft=milliseconds(31)))
    for _ in range(20):
        bench.pricing.admitted(ticket, Instant(0))
    assert bench.cost(79) == [0.0]
