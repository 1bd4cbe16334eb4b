"""Curves are shares of all offered requests; warm-up requests and invalid runs are excluded."""

from typing import Any

from benchmark_control_plane.report.samples import pool_samples
from tests import experiments

KEY = ("tandem", 1.0, "interactive")


def records(content: Any, *ends: tuple[str, float | None]) -> list[dict[str, Any]]:
    """One request of the class for each (outcome, TTFT), in the first run of KEY; MET and LATE are whole."""
    index = next(i for i, run in enumerate(content["runs"]) if (run["system"], run["load"]) == KEY[:2])
    model = next(r for r in experiments.requests(content) if r["run"] == index and r["class"] == KEY[2])
    return [
        {
            **model, "warmup": False, "outcome": outcome, "ttft_ms": ttft, "tpot_ms": None,
            "e2e_ms": ttft if outcome in ("MET", "LATE") else None,
        }
        for outcome, ttft in ends
    ]  # fmt: skip


def test_a_curve_ends_at_the_share_of_lost_requests() -> None:
    content = experiments.results(loads=(1.0,))
    ends = (("MET", 10.0), ("LATE", 40.0), ("MET", 20.0), ("REJECTED", None), ("FAILED", None))
    sample = pool_samples(content, records(content, *ends))[KEY]
    assert sample.curve("ttft_ms") == [(10.0, 0.2), (20.0, 0.4), (40.0, 0.6)]
    assert sample.outcomes == {"MET": 2, "LATE": 1, "REJECTED": 1, "FAILED": 1}


def test_a_curve_ends_at_the_share_that_was_unfinished_after_the_drain() -> None:
    content = experiments.results(loads=(1.0,))
    sample = pool_samples(content, records(content, ("MET", 10.0), ("LATE", None), ("LATE", None)))[KEY]
    assert sample.curve("ttft_ms") == [(10.0, 1 / 3)]


def test_an_answer_lost_or_cut_off_after_its_first_token_has_no_latency() -> None:
    content = experiments.results(loads=(1.0,))
    ends = records(content, ("MET", 30.0), ("EVICTED", 10.0), ("LATE", 20.0))
    ends[2]["e2e_ms"] = None
    assert pool_samples(content, ends)[KEY].curve("ttft_ms") == [(30.0, 1 / 3)]


def test_an_output_of_one_token_has_no_tpot_and_is_no_loss() -> None:
    content = experiments.results(loads=(1.0,))
    sample = pool_samples(content, records(content, ("MET", 10.0), ("REJECTED", None)))[KEY]
    assert sample.curve("tpot_ms") == [] and sample.lost["tpot_ms"] == 1


def test_a_curve_has_a_bounded_number_of_points() -> None:
    content = experiments.results(loads=(1.0,))
    sample = pool_samples(content, records(content, *(("MET", float(i)) for i in range(1, 5001))))[KEY]
    curve = sample.curve("ttft_ms")
    assert len(curve) <= 81 and curve[0] == (1.0, 1 / 5000) and curve[-1] == (5000.0, 1.0)
    assert curve == sorted(curve)


def test_warm_up_and_invalid_runs_are_excluded() -> None:
    content = experiments.results(loads=(1.0,))
    requests = records(content, ("MET", 10.0), ("MET", 20.0))
    requests[0]["warmup"] = True
    assert pool_samples(content, requests)[KEY].outcomes == {"MET": 1}
    for run in content["runs"]:
        run["valid"] = False
    assert pool_samples(content, requests) == {}
