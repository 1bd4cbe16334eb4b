import pytest

from benchmark_control_plane.judge import analysis
from benchmark_control_plane.judge.records import PartialResponse, SloTargets, judge_response, loss_of
from benchmark_control_plane.judge.workload import PlannedRequest
from controlplane.core.decision import Outcome
from controlplane.core.request import Kind

TARGETS = SloTargets(ttft_ms=150)


def record(number, ttft_s, *, name="chat", tenant="t", loss=None, decision=None):
    planned = PlannedRequest(f"r{number}", float(number), Kind.GENERATE, name, tenant, output_tokens=3)
    answer = PartialResponse(sent=float(number), loss=loss, decision=decision)
    if loss is None:
        answer.tokens = [number + ttft_s, number + ttft_s + 0.01, number + ttft_s + 0.04]
        answer.ended = answer.tokens[-1]
    return judge_response(planned, float(number), answer, 0.0, TARGETS)


def test_a_rejected_request_is_a_miss():
    records = [record(0, 0.1), record(1, 0.2), record(2, 0, loss=Outcome.REJECTED), record(3, 0.1)]
    assert analysis.attainments(records) == {"overall": 0.5, "chat": 0.5}
    assert analysis.losses(records) == {"reject": 0.25, "evict": 0, "abort": 0, "fail": 0}


def test_percentiles_of_delivered_requests_lie_in_their_intervals():
    records = [record(n, n / 1_000) for n in range(1, 101)] + [record(101, 0, loss=Outcome.FAILED)]
    found = analysis.percentiles(records, seed=0)["chat"]
    assert found["ttft_ms"]["p50"][0] == pytest.approx(50.5)
    assert found["ttft_ms"]["p90"][0] == pytest.approx(90.1)
    for value, low, high in found["ttft_ms"].values():
        assert low <= value <= high
    low, high = found["ttft_ms"]["p50"][1:]
    assert 35 < low < 50 < high < 65
    assert found["tpot_ms"]["p99"] == pytest.approx([20, 20, 20])
    assert found["tbt_ms"]["p50"][0] == pytest.approx(20)


def test_answers_lost_after_their_first_token_have_no_latency():
    """Otherwise a system that evicts what it has begun would show short times to the first token."""
    planned = PlannedRequest("r", 5.0, Kind.GENERATE, "chat", output_tokens=3)
    lost = [PartialResponse(sent=5.0, tokens=[5.001], loss=loss) for loss in (Outcome.EVICTED, Outcome.LATE)]
    records = [record(0, 0.1), *(judge_response(planned, 5.0, answer, 0.0, TARGETS) for answer in lost * 2)]
    whole = analysis.summary(records, measured=10, seed=0, priorities={})
    assert whole["percentiles"]["chat"]["ttft_ms"]["p50"] == pytest.approx([100, 100, 100])
    assert whole["delivered"] == {"chat": 0.2}


def test_interval_resamples_requests_not_gaps():
    """All gaps of a request are equal, so a thousand gaps carry the information of ten requests."""
    records = []
    for number in range(20):
        gap = 0.01 if number < 12 else 0.05
        answer = PartialResponse(sent=0.0, tokens=[gap * n for n in range(101)], ended=9.0)
        planned = PlannedRequest(f"r{number}", 0.0, Kind.GENERATE, "chat", output_tokens=101)
        records.append(judge_response(planned, 0.0, answer, 0.0, TARGETS))
    assert analysis.percentiles(records, seed=0)["chat"]["tbt_ms"]["p50"] == pytest.approx([10, 10, 50])


def test_fairness_is_over_tenants_if_there_are_several():
    mine = [record(n, 0.1, tenant="a") for n in range(4)]
    yours = [record(n, 0.9, tenant="b") for n in range(4)]
    assert analysis.fairness(mine + yours, {})["jain"] == pytest.approx(0.5)
    assert analysis.fairness(mine, {})["jain"] == 1.0
    assert analysis.fairness(yours, {})["jain"] is None


def test_priority_gap_is_highest_minus_lowest():
    high = [record(n, 0.1, name="high") for n in range(4)]
    low = [record(n, 0.9 if n else 0.1, name="low") for n in range(4)]
    assert analysis.fairness(high + low, {"high": 10, "low": 2})["priority_gap"] == 0.75


def test_decisions_are_counted_by_the_names_of_the_server():
    named = [record(n, 0.1, decision=d) for n, d in enumerate(("ADMIT", "ADMIT", "DEFER", None))]
    assert analysis.decisions(named) == {"admit": 2, "admit_with_preemption": 0, "defer": 1, "reject": 0}
    assert analysis.decisions(named[3:]) is None


def test_summary_is_over_the_measured_window():
    whole = analysis.summary([record(n, 0.1) for n in range(20)], measured=10, seed=0, priorities={})
    assert whole["goodput_rps"] == 2.0 and whole["attainment"]["overall"] == 1.0
    assert whole["tokens_per_s"] == {"output": 6.0, "embedded": 0.0}


def test_empty_window_has_no_attainment():
    assert analysis.summary([], measured=10, seed=0, priorities={})["attainment"] == {"overall": None}
    assert analysis.lateness([])["p99"] is None


@pytest.mark.parametrize(
    ("status", "code", "dropped", "outcome"),
    [
        (429, "slo_unattainable", "rejected-saturated", Outcome.REJECTED),
        (503, None, None, Outcome.REJECTED),
        (503, "backend_down", None, Outcome.FAILED),
        (500, None, None, Outcome.FAILED),
        (400, "context_length_exceeded", None, Outcome.FAILED),
        (200, "preempted", None, Outcome.EVICTED),
        (429, "preempted", "evicted-priority", Outcome.EVICTED),
    ],
)
def test_http_error_maps_to_a_loss(status, code, dropped, outcome):
    assert loss_of(status, code, dropped) is outcome
