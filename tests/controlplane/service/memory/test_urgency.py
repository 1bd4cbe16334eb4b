"""Slack of waiting and running requests, by their objectives and the order of service."""

from controlplane.core.clock import Duration, Instant, milliseconds
from controlplane.core.memory_ledger import Footprint
from controlplane.core.pool_view import Pace
from controlplane.core.request import Kind, Owner, Timeline
from controlplane.core.slo import Slo
from controlplane.policy.sharing.quota import UrgencyOptions
from controlplane.service.memory.demand_forecast import RecentArrivals, slacks, urgencies
from controlplane.service.ticket import Ticket
from tests.example_requests import a_request

CRITICAL = milliseconds(500)
PACES = {
    Owner.LLM: Pace(milliseconds(20), milliseconds(0.1)),
    Owner.EMBEDDING: Pace(Duration(0), milliseconds(0.1)),
}


def ticket(kind=Kind.EMBED, *, tokens=1_000, name="a", **slo_ms) -> Ticket:
    slo = Slo(**{part: milliseconds(value) for part, value in slo_ms.items()})
    request = a_request(name, tokens, 10, kind=kind, slo=slo)
    return Ticket(request, Footprint(1, 1, 10), None, Timeline(Instant(0)), None)


def slack_ms(tickets, owner=Owner.EMBEDDING, at_ms=0.0, remaining=None):
    found = slacks(tickets, PACES, remaining or {}, Instant(milliseconds(at_ms)), CRITICAL)[owner]
    return [slack / 1e6 for slack in found]


def test_an_embedding_waits_for_the_work_before_it_by_deadline():
    first, second = ticket(name="a", e2e=2_000), ticket(name="b", e2e=1_500, tokens=3_000)
    # 3,000 tokens of 0.1 ms for the earlier deadline, 1,000 more for the later one.
    assert slack_ms([first, second]) == [1_200, 1_600]
    assert slack_ms([second, first], at_ms=1_500) == [-300, 100]


def test_embeddings_of_one_pass_wait_for_its_constant_time_once():
    paces = PACES | {Owner.EMBEDDING: Pace(milliseconds(50), milliseconds(0.1))}
    calls = [ticket(name="a", e2e=2_000), ticket(name="b", e2e=1_500, tokens=3_000)]
    found = slacks(calls, paces, {}, Instant(0), CRITICAL)[Owner.EMBEDDING]
    assert found == [milliseconds(1_150), milliseconds(1_550)]


def test_a_request_without_objectives_is_never_urgent():
    assert slack_ms([ticket()]) == []
    assert slack_ms([ticket(Kind.GENERATE)], Owner.LLM) == []


def test_slack_of_a_short_objective_is_scaled_by_its_half():
    # An objective of 200 ms with 100 ms of work: half is left, as urgent as 500 of 1,000 ms.
    assert slack_ms([ticket(e2e=200)]) == [500]
    assert slack_ms([ticket(e2e=200)], at_ms=50) == [250]
    assert slack_ms([ticket(e2e=200)], at_ms=150) == [-50]


def test_slack_counts_the_prefill_before_the_first_token_and_tpot_after_it():
    chat = ticket(Kind.GENERATE, ttft=2_000, tpot=1_000)
    assert slack_ms([chat], Owner.LLM) == [2_000 - 100 - 20]
    chat.timeline.stamp_tokens(Instant(milliseconds(300)), 1)
    assert slack_ms([chat], Owner.LLM, at_ms=400) == [900]


def test_slack_of_a_begun_answer_is_the_least_of_pace_gap_and_whole_answer():
    def at_500(**slo):
        chat = ticket(Kind.GENERATE, **slo)
        for at in (300, 400):
            chat.timeline.stamp_tokens(Instant(milliseconds(at)), 1)
        return slack_ms([chat], Owner.LLM, at_ms=500, remaining={"a": 8})

    assert at_500(ttft=100) == []
    assert at_500(tpot=1_000) == [300 + 2_000 - 500]
    assert at_500(tpot=1_000, gap=1_200) == [400 + 1_200 - 500]
    # Seven tokens of 20 ms follow the next one.
    assert at_500(tpot=1_000, e2e=1_000) == [1_000 - 7 * 20 - 500]
    assert at_500(gap=50) == [-50]


def test_a_preempted_generation_has_all_steps_of_its_new_footprint_to_come():
    chat = ticket(Kind.GENERATE, e2e=2_000)
    chat.timeline.stamp_tokens(Instant(milliseconds(300)), 40)
    # Of ten steps to come, nine follow the next one.
    assert slack_ms([chat], Owner.LLM, at_ms=500) == [2_000 - 9 * 20 - 500]


def test_a_victim_without_hope_has_no_slack_and_one_that_can_recover_has_none_left():
    def slack_at(at_ms, **slo):
        chat = ticket(Kind.GENERATE, **slo)
        for at in (300, 400):
            chat.timeline.stamp_tokens(Instant(milliseconds(at)), 1)
        now, pace = Instant(milliseconds(at_ms)), PACES[Owner.LLM]
        return chat.as_running(now, pace, freed_bytes=1, remaining_steps=8, shared_tokens=0).slack

    # Up to 8 tokens of 20 ms to come, instead of 100 ms: behind by at most 560 ms it recovers.
    assert slack_at(450, tpot=100) == milliseconds(50)
    assert slack_at(550, tpot=100) == 0
    assert slack_at(1_060, tpot=100) == 0
    assert slack_at(1_061, tpot=100) is None
    assert slack_at(450, tpot=100, gap=99) is None
    assert slack_at(450, tpot=100, ttft=299) is None


def test_rejected_requests_count_and_decay():
    lately, now = RecentArrivals(), Instant(0)
    lately.fade(now)
    lately.rejected[Owner.LLM] += 1
    options = UrgencyOptions(critical=CRITICAL, critical_weight=2.0)
    assert urgencies([], PACES, {}, lately, now, options) == {Owner.LLM: 2.0, Owner.EMBEDDING: 0.0}
    lately.fade(Instant(milliseconds(15_000)))
    assert urgencies([], PACES, {}, lately, now, options)[Owner.LLM] < 0.02
