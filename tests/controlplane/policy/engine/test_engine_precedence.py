"""The gate's estimate of the engine's size cutoff, and the rejection that follows from it."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.core.clock import Duration, Instant, after, milliseconds, seconds
from controlplane.core.decision import Admit, Reason, Reject
from controlplane.core.memory_ledger import Footprint, LeaseTable
from controlplane.core.pool_view import Pace, Share, Waiting
from controlplane.core.slo import Slo
from controlplane.policy.engine.engine_precedence import EngineCutoff, EnginePrecedence, by_rank, by_size
from controlplane.policy.engine.gate_view_adapter import lease_table
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.gate.admission import Admission, AdmissionOptions, fits_ahead
from controlplane.policy.gate.memory_lookahead import LookAhead
from tests.example_requests import a_request

MEMORY, STEP, PATIENCE = 10_000, milliseconds(10), seconds(60)
ADMISSION = Admission(AdmissionOptions(0, seconds(600), Duration(0)), fits_ahead)


def entry(
    name: str,
    at: Instant,
    *,
    steps: int = 100,
    weight: float = 1.0,
    sheddable: bool = True,
    limit: int = 9_000,
) -> Waiting:
    slo, tokens = Slo(ttft=seconds(1)), 100
    request = a_request(name, tokens, limit, slo=slo, arrival=at, weight=weight, sheddable=sheddable)
    footprint = Footprint(base=tokens, per_step=0, steps=steps, worst=tokens)
    return Waiting(request, footprint, after(at, seconds(1)), (0, at, name), footprint.area)


def loaded(load: float) -> tuple[EngineCutoff, Instant]:
    """After 200 arrivals that keep `load` of the memory resident, every fourth ten times as large."""
    cutoff = EngineCutoff(window=200, share=0.75, patience=PATIENCE, aged_share=0.1)
    mean = (3 * 10_000 + 100_000) / 4
    apart, now = milliseconds(10 * mean / (load * MEMORY)), Instant(0)
    for number in range(200):
        now = Instant(number * apart)
        cutoff.arrived(entry(f"r{number}", now, steps=1_000 if number % 4 == 0 else 100))
        cutoff.stepped(now, MEMORY, round(0.75 * MEMORY), STEP)
    return cutoff, now


@pytest.mark.parametrize(
    ("load", "held", "steps", "weight", "waits"),
    [
        (0.7, 9_000, 2_000, 1.0, False),
        (1.5, 9_000, 100, 1.0, False),
        (1.5, 9_000, 2_000, 1.0, True),
        (1.5, 9_000, 2_000, 10.0, False),
        (1.5, 0, 2_000, 1.0, False),
    ],
    ids=["no overload", "small", "large", "large of high weight", "idle engine"],
)
def test_only_what_the_engine_would_not_start_waits_for_its_patience(load, held, steps, weight, waits):
    cutoff, now = loaded(load)
    ahead = cutoff.work_ahead(entry("new", now, steps=steps, weight=weight), [], MEMORY, held, STEP)
    assert ahead == (MEMORY * PATIENCE / STEP if waits else 0.0)


@pytest.mark.parametrize(
    ("steps", "sheddable", "rejected"), [(2_000, True, True), (2_000, False, False), (100, True, False)]
)
def test_a_sheddable_request_above_the_cutoff_is_rejected_at_once(steps, sheddable, rejected):
    cutoff, now = loaded(1.5)
    view = EngineView(now, Pace(STEP, Duration(0)), 16, MEMORY // 16, 0, 0, 64, RunningBatch())
    share = Share(
        MEMORY, 9_000, 0, MEMORY, 64, lease_table(RunningBatch(), view), Pace(STEP, Duration(0)),
        engine_work_ahead=lambda waiting: cutoff.work_ahead(waiting, [], MEMORY, 9_000, STEP),
    )  # fmt: skip
    new = entry("new", now, steps=steps, sheddable=sheddable)
    verdict = ADMISSION.try_forward(share, LookAhead(share.leases), new, now)
    assert isinstance(verdict, Reject if rejected else Admit)
    if isinstance(verdict, Reject):
        assert verdict.reason is Reason.SLO_UNATTAINABLE
        assert verdict.wait == PATIENCE
    patient = replace(new, request=replace(new.request, slo=Slo(ttft=seconds(120))))
    assert isinstance(ADMISSION.try_forward(share, LookAhead(share.leases), patient, now), Admit)


def test_requests_above_the_cutoff_wait_for_each_other_on_their_share():
    cutoff, now = loaded(1.5)
    new, large, small = (
        entry(name, now, steps=steps) for name, steps in (("n", 2_000), ("l", 3_000), ("s", 9))
    )
    alone = cutoff.work_ahead(new, [small], MEMORY, 9_000, STEP)
    assert cutoff.work_ahead(new, [small, large, large], MEMORY, 9_000, STEP) == alone + 2 * large.work / 0.1


def test_a_request_without_a_forecast_is_exempt():
    cutoff, now = loaded(1.5)
    guess = entry("new", now, steps=2_000, limit=2_000)
    assert cutoff.work_ahead(guess, [], MEMORY, 9_000, STEP) == 0.0


def test_an_engine_keeps_what_is_not_larger_by_the_ratio_or_without_one_what_is_of_no_lower_class():
    """The request needs 10,000 byte-steps at a weight of 1."""
    leases = LeaseTable(
        ids=("equal", "larger", "larger of high weight", "growing"),
        base=np.array([100.0, 100.0, 100.0, 100.0]),
        per_step=np.array([0.0, 0.0, 0.0, 2.0]),
        steps=np.array([200.0, 201.0, 201.0, 150.0]),
        priority=np.array([-1.0, 0.0, 1.0, 0.0]),
    )
    weights, new = (1.0, 1.0, 2.0, 2.0), entry("new", Instant(0))
    by_ratio = EnginePrecedence(by_size, preempt_ratio=2.0).kept(leases, weights, new)
    assert by_ratio.ids == ("equal", "larger of high weight", "growing")
    assert EnginePrecedence(by_rank).kept(leases, weights, new).ids == leases.ids[1:]
