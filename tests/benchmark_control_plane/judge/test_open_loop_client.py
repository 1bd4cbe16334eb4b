"""Tests of the load generator in virtual time, where a known delay is measured exactly."""

import asyncio

import pytest

from benchmark_control_plane.judge.open_loop_client import closed_loop, open_loop
from benchmark_control_plane.judge.records import (
    PartialResponse,
    SloTargets,
    judge_response,
    judge_unfinished,
)
from benchmark_control_plane.judge.workflow_stages import WorkflowStage
from benchmark_control_plane.judge.workload import PlannedRequest
from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

CLASSES = {"chat": SloTargets(ttft_ms=500, tpot_ms=100), "documents": SloTargets(e2e_ms=800)}


class Scripted:
    """Target with `first` seconds to the first token and `gap` between tokens, for at most `places` requests.

    A stall delays every request that starts within it.
    """

    def __init__(self, first=0.3, gap=0.05, stall=(0.0, 0.0), places=1_000, loses=()):
        self.first, self.gap, self.stall, self.loses = first, gap, stall, loses
        self.places = asyncio.Semaphore(places)
        self.asked, self.stated = [], []

    async def send(self, planned, answer):
        loop = asyncio.get_running_loop()
        async with self.places:
            answer.sent = loop.time()
            self.asked.append(planned.id)
            self.stated.append(planned.e2e_ms)
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
        return await open_loop(
            target or Scripted(), plan, CLASSES, warmup=warmup, drain=drain, clock=loop.time,
            tick=lambda answered, planned: None if ticks is None else ticks.append((answered, planned)),
        )  # fmt: skip

    result = run(go())
    return {record.planned.id: record for record in result.records}, result


def test_scripted_delay_is_measured_exactly():
    records, _ = played([chat(0, 1.0), document(1, 1.2)])
    one = records["r0"]
    assert (one.ttft_ms, one.tpot_ms, one.gap_ms) == pytest.approx((300, 50, 50))
    assert one.e2e_ms == pytest.approx(500) and one.outcome is Outcome.MET
    assert records["d1"].e2e_ms == pytest.approx(300) and records["d1"].ttft_ms is None


def test_each_objective_is_judged():
    late_first, _ = played([chat(0, 0)], Scripted(first=0.6))
    slow, _ = played([chat(0, 0)], Scripted(gap=0.2))
    one_token, _ = played([chat(0, 0, tokens=1)], Scripted(gap=0.2))
    late_document, _ = played([document(0, 0)], Scripted(first=0.9))
    assert late_first["r0"].outcome is slow["r0"].outcome is late_document["d0"].outcome is Outcome.LATE
    assert one_token["r0"].outcome is Outcome.MET


def test_one_long_pause_misses_the_gap_and_not_the_mean():
    tokens = [0.1 * number for number in range(1, 10)]
    paused = PartialResponse(sent=0.0, tokens=[*tokens, tokens[-1] + 0.4], ended=1.3)
    objective, planned = SloTargets(tpot_ms=200, gap_ms=300), chat(0, 0.0, tokens=10)
    record = judge_response(planned, 0.0, paused, 0.0, objective)
    assert record.gap_ms == pytest.approx(400)
    assert record.tpot_ms == pytest.approx(1_200 / 9) and record.outcome is Outcome.LATE
    loose = judge_response(planned, 0.0, paused, 0.0, SloTargets(tpot_ms=200, gap_ms=401))
    one = judge_response(planned, 0.0, PartialResponse(0.0, [0.1], 0.1), 0.0, objective)
    assert loose.outcome is one.outcome is Outcome.MET and one.gap_ms is None


@pytest.mark.parametrize(("now", "outcome"), [(0.49, Outcome.ABORTED), (0.51, Outcome.LATE)])
def test_a_pause_that_is_too_long_already_is_late(now, outcome):
    answer = PartialResponse(sent=0.0, tokens=[0.1, 0.2])
    record = judge_unfinished(chat(0, 0.0), 0.0, answer, 0.0, now, SloTargets(gap_ms=300))
    assert record.outcome is outcome


def test_stall_does_not_hide_requests_due_in_it():
    """Coordinated omission: a client that waits for the stalled response would see one slow request."""
    records, _ = played([chat(n, n / 10) for n in range(100)], Scripted(stall=(2.0, 5.0)))
    waited = [records[f"r{n}"].ttft_ms - 300 for n in range(20, 50)]
    assert waited == pytest.approx([1e3 * (5.0 - n / 10) for n in range(20, 50)])
    assert sum(r.outcome is Outcome.LATE for r in records.values()) == 28


def test_connection_limit_makes_requests_late():
    """One connection at 0.5 s per request, overloaded: each request waits longer than the previous one."""
    records, result = played([chat(n, n / 4) for n in range(20)], Scripted(places=1))
    last = records["r19"]
    assert last.sent - last.scheduled == pytest.approx(20 * 0.5 - 0.5 - 19 / 4)
    assert last.ttft_ms == pytest.approx(300 + 1e3 * (last.sent - last.scheduled))
    assert max(result.lateness) == pytest.approx(last.sent - last.scheduled)


def test_follower_is_due_when_its_predecessor_completes():
    plan = [document(0, 1.0), chat(1, 1.0, after="d0")]
    records, _ = played(plan)
    assert records["r1"].scheduled == pytest.approx(1.3) and records["r1"].ttft_ms == pytest.approx(300)


def test_follower_of_a_lost_request_is_lost():
    target = Scripted(loses=("d0",))
    records, _ = played([document(0, 1.0), chat(1, 1.0, after="d0")], target)
    assert records["r1"].outcome is Outcome.REJECTED and target.asked == ["d0"]


def workflow(*, deadline_ms, part=0.0, **lengths):
    """Query, rerank and answer from 1 s on."""
    stages = [WorkflowStage("w", name, deadline_ms, part=part) for name in ("query", "rerank", "answer")]
    return [
        document(0, 1.0, stage=stages[0]),
        document(1, 1.0, stage=stages[1], after="d0"),
        chat(2, 1.0, stage=stages[2], after="d1", **lengths),
    ]


def test_a_workflow_is_judged_from_its_first_stage():
    # 0.3 s each, and 0.2 s of tokens.
    kept, _ = played(workflow(deadline_ms=1_101))
    late, _ = played(workflow(deadline_ms=1_099))
    assert kept["r2"].e2e_ms == late["r2"].e2e_ms == pytest.approx(1_100)
    assert (kept["r2"].outcome, late["r2"].outcome) == (Outcome.MET, Outcome.LATE)


def test_a_stage_states_its_part_of_what_remains():
    target = Scripted()
    played(workflow(deadline_ms=2_000, part=0.5), target)
    assert target.stated == pytest.approx([1_000, 850, 700])


def test_no_stage_is_sent_after_the_deadline():
    target = Scripted()
    records, result = played(workflow(deadline_ms=500), target)
    assert target.asked == ["d0", "d1"] and len(result.lateness) == 2
    assert [records[name].outcome for name in ("d0", "d1", "r2")] == [Outcome.MET, *[Outcome.LATE] * 2]


def test_a_lost_stage_loses_all_later_ones():
    records, _ = played(workflow(deadline_ms=2_000), Scripted(loses=("d0",)))
    assert {records[name].outcome for name in ("d0", "d1", "r2")} == {Outcome.REJECTED}


def test_all_stages_of_a_workflow_that_is_cut_off_are_recorded():
    records, _ = played(workflow(deadline_ms=2_000), Scripted(first=30), drain=3.0)
    assert {name: record.outcome for name, record in records.items()} == {
        "d0": Outcome.LATE, "d1": Outcome.LATE, "r2": Outcome.LATE
    }  # fmt: skip


def test_unfinished_requests_are_judged_if_decided():
    slow = Scripted(first=30)
    records, _ = played([chat(0, 0.0), document(1, 0.2)], slow, drain=0.7)
    # 0.9 s after it was due, the chat has missed 500 ms; 0.7 s after it was due, the document has not missed
    # 800 ms.
    assert records["r0"].outcome is Outcome.LATE and records["d1"].outcome is Outcome.ABORTED
    assert records["r0"].e2e_ms is None


def test_unsent_request_has_the_largest_lateness():
    """One connection: nine requests get none until the cut-off, four seconds after the last was due."""
    _, result = played([chat(n, n / 10) for n in range(10)], Scripted(first=30, places=1), drain=4.0)
    assert sorted(result.lateness) == pytest.approx([0, *(4 + n / 10 for n in range(9))])


def test_every_planned_request_has_one_record():
    ticks = []
    plan = [one for n in range(30) for one in (document(n, n / 10), chat(n, n / 10, after=f"d{n}"))]
    records, result = played(plan, Scripted(first=2.0, loses=("d3",)), drain=1.0, ticks=ticks)
    assert len(records) == len(result.records) == 60
    assert ticks[-1] == (60, 60)


def test_warmup_precedes_the_window():
    records, _ = played([chat(0, -1.0), chat(1, 0.5)], warmup=2.0)
    assert records["r0"].scheduled == pytest.approx(-1.0) and records["r0"].planned.is_warmup
    assert records["r1"].first == pytest.approx(0.8)


def test_closed_loop_keeps_all_clients_busy():
    async def go():
        loop = asyncio.get_running_loop()
        plan = [chat(n, 0.0) for n in range(100)]
        return await closed_loop(Scripted(), plan, clients=4, seconds=3.0, clock=loop.time)

    # Half a second each, four at a time; the last four start just before the end.
    assert len(run(go()).records) in (24, 28)
