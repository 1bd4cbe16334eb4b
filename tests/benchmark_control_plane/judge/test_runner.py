"""All on virtual time: a known delay is measured exactly, and nothing waits."""

import asyncio

import pytest

from benchmark_control_plane.judge.records import SloTargets
from benchmark_control_plane.judge.runner import closed_loop, play
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

CLASSES = {"chat": SloTargets(ttft_ms=500, tpot_ms=100), "documents": SloTargets(e2e_ms=800)}


class Scripted:
    """First token after `first` seconds, each further one after `gap`; a stall holds everything that
    starts within it. At most `places` at once."""

    def __init__(self, first=0.3, gap=0.05, stall=(0.0, 0.0), places=1_000, loses=()):
        self.first, self.gap, self.stall, self.loses = first, gap, stall, loses
        self.places = asyncio.Semaphore(places)
        self.asked = []

    async def send(self, planned, answer):
        loop = asyncio.get_running_loop()
        async with self.places:
            answer.sent = loop.time()
            self.asked.append(planned.id)
            start, end = self.stall
            if start <= loop.time() < end:
                await asyncio.sleep(end - loop.time())
            await asyncio.sleep(self.first)
            if planned.id in self.loses:
                answer.loss = Outcome.REJECTED
                return
            for number in range(planned.output_tokens):
                await asyncio.sleep(self.gap if number else 0)
                answer.tokens.append(loop.time())
            answer.ended = loop.time()


def chat(number, at, tokens=5, **more):
    return PlannedRequest(f"r{number}", at, Kind.GENERATE, "chat", output_tokens=tokens, **more)


def document(number, at, **more):
    return PlannedRequest(f"d{number}", at, Kind.EMBED, "documents", lengths=(8,), **more)


def played(plan, target=None, warmup=0.0, drain=60.0, ticks=None):
    async def go():
        loop = asyncio.get_running_loop()
        return await play(
            target or Scripted(), plan, CLASSES, warmup=warmup, drain=drain, clock=loop.time,
            tick=lambda answered, planned: None if ticks is None else ticks.append((answered, planned)),
        )  # fmt: skip

    result = run(go())
    return {record.planned.id: record for record in result.records}, result


def test_a_scripted_delay_is_measured_as_scripted():
    records, _ = played([chat(0, 1.0), document(1, 1.2)])
    one = records["r0"]
    assert (one.ttft_ms, one.tpot_ms, one.max_tbt_ms) == pytest.approx((300, 50, 50))
    assert one.e2e_ms == pytest.approx(500) and one.outcome is Outcome.MET
    assert records["d1"].e2e_ms == pytest.approx(300) and records["d1"].ttft_ms is None


def test_each_objective_is_judged():
    late_first, _ = played([chat(0, 0)], Scripted(first=0.6))
    slow, _ = played([chat(0, 0)], Scripted(gap=0.2))
    one_token, _ = played([chat(0, 0, tokens=1)], Scripted(gap=0.2))
    late_document, _ = played([document(0, 0)], Scripted(first=0.9))
    assert late_first["r0"].outcome is slow["r0"].outcome is late_document["d0"].outcome is Outcome.LATE
    assert one_token["r0"].outcome is Outcome.MET


def test_a_stall_does_not_hide_the_requests_that_were_due_in_it():
    """Coordinated omission: a client that waits for the stalled answer would see one slow request."""
    records, _ = played([chat(n, n / 10) for n in range(100)], Scripted(stall=(2.0, 5.0)))
    waited = [records[f"r{n}"].ttft_ms - 300 for n in range(20, 50)]
    assert waited == pytest.approx([1e3 * (5.0 - n / 10) for n in range(20, 50)])
    assert sum(r.outcome is Outcome.LATE for r in records.values()) == 28


def test_a_bound_on_connections_makes_requests_late_not_absent():
    """One place, 0.5 s a request, two a second more than that serves: each waits longer than the last."""
    records, result = played([chat(n, n / 4) for n in range(20)], Scripted(places=1))
    last = records["r19"]
    assert last.sent - last.scheduled == pytest.approx(20 * 0.5 - 0.5 - 19 / 4)
    assert last.ttft_ms == pytest.approx(300 + 1e3 * (last.sent - last.scheduled))
    assert max(result.lateness) == pytest.approx(last.sent - last.scheduled)


def test_a_request_that_waits_for_another_is_due_when_that_has_answered():
    plan = [document(0, 1.0), chat(1, 1.0, after="d0")]
    records, _ = played(plan)
    assert records["r1"].scheduled == pytest.approx(1.3) and records["r1"].ttft_ms == pytest.approx(300)


def test_what_waits_for_a_lost_answer_is_lost_with_it():
    target = Scripted(loses=("d0",))
    records, _ = played([document(0, 1.0), chat(1, 1.0, after="d0")], target)
    assert records["r1"].outcome is Outcome.REJECTED and target.asked == ["d0"]


def test_what_is_unfinished_at_the_end_of_the_drain_is_judged_if_it_can_be():
    slow = Scripted(first=30)
    records, _ = played([chat(0, 0.0), document(1, 0.2)], slow, drain=0.7)
    # 0.9 s after it was due the chat has broken 500 ms, 0.7 s after it was due the document kept 800.
    assert records["r0"].outcome is Outcome.LATE and records["d1"].outcome is Outcome.ABORTED
    assert records["r0"].e2e_ms is None


def test_who_was_never_sent_is_later_than_anybody():
    """One place: nine find none until the rest is given up, four seconds after the last was due."""
    _, result = played([chat(n, n / 10) for n in range(10)], Scripted(first=30, places=1), drain=4.0)
    assert sorted(result.lateness) == pytest.approx([0, *(4 + n / 10 for n in range(9))])


def test_every_planned_request_has_one_record():
    ticks = []
    plan = [one for n in range(30) for one in (document(n, n / 10), chat(n, n / 10, after=f"d{n}"))]
    records, result = played(plan, Scripted(first=2.0, loses=("d3",)), drain=1.0, ticks=ticks)
    assert len(records) == len(result.records) == 60
    assert ticks[-1] == (60, 60)


def test_warmup_comes_before_the_window():
    records, _ = played([chat(0, -1.0), chat(1, 0.5)], warmup=2.0)
    assert records["r0"].scheduled == pytest.approx(-1.0) and records["r0"].planned.is_warmup
    assert records["r1"].first == pytest.approx(0.8)


def test_closed_loop_keeps_so_many_asking():
    async def go():
        loop = asyncio.get_running_loop()
        plan = [chat(n, 0.0) for n in range(100)]
        return await closed_loop(Scripted(), plan, clients=4, seconds=3.0, clock=loop.time)

    # Half a second each, four at a time; the last are begun just at the end.
    assert len(run(go()).records) in (24, 28)
