"""What a second of the device's time is worth to generations that are not in the engine yet."""

import pytest

from controlplane.core.clock import Instant, seconds
from controlplane.core.decision import Outcome
from controlplane.core.memory_ledger import Footprint
from controlplane.core.request import Kind, Timeline
from controlplane.service.gate.opportunity_cost import OpportunityCost
from controlplane.service.ticket import Ticket
from tests.example_requests import a_request


def ended(cost: OpportunityCost, outcome: Outcome, at: float, kind: Kind = Kind.GENERATE) -> None:
    request = a_request("a", 10, 10, kind=kind)
    timeline = Timeline(Instant(0), finished=Instant(seconds(at)))
    ticket = Ticket(request, Footprint(1, 1, 10), None, timeline, None)
    ticket.outcome = outcome
    cost.request_ended(ticket)


def after_minutes_of(*outcomes: Outcome) -> float:
    """The cost after many requests of these outcomes, one every 0.1 s, at their end."""
    cost = OpportunityCost()
    for number in range(1_000):
        ended(cost, outcomes[number % len(outcomes)], number / 10)
    return cost.per_second(Instant(seconds(100)))


def test_time_costs_nothing_while_every_generation_is_in_time():
    assert OpportunityCost().per_second(Instant(seconds(5))) == 0.0
    assert after_minutes_of(Outcome.MET) == 0.0


def test_a_few_that_miss_their_slo_by_chance_cost_nothing():
    assert after_minutes_of(Outcome.LATE, *[Outcome.MET] * 199) == 0.0
    one_in_ten = after_minutes_of(Outcome.LATE, *[Outcome.MET] * 9)
    assert one_in_ten == pytest.approx(9 * (0.1 - 0.005), rel=0.1)


def test_time_costs_the_rate_of_met_slos_by_the_share_of_missed_ones():
    assert after_minutes_of(Outcome.MET, Outcome.LATE) == pytest.approx(2.5, rel=0.05), "5/s, half missed"
    rejected = after_minutes_of(Outcome.MET, Outcome.REJECTED, Outcome.EVICTED, Outcome.FAILED)
    assert rejected == pytest.approx(2.5 * 0.75, rel=0.05)
    assert after_minutes_of(Outcome.REJECTED) == 0.0, "none would have been met"


def test_clients_that_leave_and_embeddings_do_not_count():
    assert after_minutes_of(Outcome.MET, Outcome.ABORTED) == 0.0
    cost = OpportunityCost()
    ended(cost, Outcome.MET, 1.0)
    ended(cost, Outcome.LATE, 1.0, Kind.EMBED)
    assert cost.per_second(Instant(seconds(1))) == 0.0


def test_the_cost_fades():
    cost = OpportunityCost()
    for outcome in (Outcome.MET, Outcome.LATE):
        ended(cost, outcome, 1.0)
    at_once, later = (cost.per_second(Instant(seconds(at))) for at in (1, 31))
    assert at_once == pytest.approx(0.0495) and later < 0.06 * at_once
