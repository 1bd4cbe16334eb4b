"""Calls computed one after another: which are rejected, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant, after, milliseconds, seconds
from controlplane.core.decision import Plan, Reason
from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.pool_view import Pace, PoolView, Queue, Share, Waiting
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.gate.admission import Admission, AdmissionOptions
from controlplane.policy.gate.moore_hodgson import DeadlineJob, late_jobs, tokens_before
from controlplane.policy.gate.scheduling_cycle import run_cycle
from controlplane.policy.registry import ADMISSIONS, lookup

NOW = Instant(seconds(100))
PACE = Pace(step=milliseconds(20), per_prompt_token=milliseconds(0.1))
ADMISSION = Admission(
    AdmissionOptions(max_waiting=9, max_wait=seconds(30), defer_threshold=milliseconds(50)),
    lookup("admission", ADMISSIONS, "look-ahead"),
)
INDEX = ServiceClass("index", Slo(e2e=seconds(2)), priority=0, sheddable=True)
SEARCH = ServiceClass("search", Slo(e2e=seconds(2)), priority=1, sheddable=True)
BACKUP = ServiceClass("backup", Slo(e2e=seconds(2)), priority=0, sheddable=False)
NIGHT = ServiceClass("night", Slo(), priority=0, sheddable=True)

Call = tuple[ServiceClass, int]
"""Class and tokens of a call, at 1,000 tokens per 0.1 s; the deadline is 2 s after arrival."""

turns = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.none() | st.integers(0, 2)), max_size=12
).map(
    lambda drawn: [
        DeadlineJob(Instant(at), n, str(n), float(size), of) for n, (at, size, of) in enumerate(drawn)
    ]
)


def called(name: str, of: ServiceClass, tokens: int, model: str, ago_ms: float = 0) -> Request:
    return Request(
        id=name, kind=Kind.EMBED, model=model, tenant="t", service_class=of, slo=of.slo,
        arrival=Instant(NOW - milliseconds(ago_ms)), prompt_tokens=tokens, max_output_tokens=0,
    )  # fmt: skip


def decided(
    held: list[Call],
    asked: list[Call],
    *,
    model: str = "m",
    held_ago_ms: float = 0,
    memory: int = 1_000,
    is_shared: bool = False,
    last_pass_ago_s: float | None = None,
    time_price: float = 0.0,
) -> Plan:
    """The plan with calls h0, h1, ... in flight and w0, w1, ... waiting; `is_shared` with generations."""
    ledger = MemoryLedger({Owner.EMBEDDING: 1_000})
    calls = []
    for n, (of, tokens) in enumerate(held):
        ledger.open(f"h{n}", Owner.EMBEDDING, Footprint(10, steps=tokens), priority=of.priority)
        calls.append((called(f"h{n}", of, tokens, "m", held_ago_ms), float(tokens)))
    waiting = [
        Waiting(
            called(f"w{n}", of, tokens, model), Footprint(10, steps=tokens), after(NOW, seconds(1.9)),
            (n, 0, f"w{n}"), float(tokens),
        )
        for n, (of, tokens) in enumerate(asked)
    ]  # fmt: skip
    share = Share(
        ceiling=memory, held=10 * len(held), deficit=0, largest=1_000, free_slots=9,
        leases=ledger.table(Owner.EMBEDDING), pace=PACE, is_serial=True, calls=tuple(calls),
        is_device_shared=is_shared, time_price=time_price,
        last_passes={} if last_pass_ago_s is None else {"m": Instant(NOW - seconds(last_pass_ago_s))},
    )  # fmt: skip
    view = PoolView({Owner.EMBEDDING: share}, {Owner.EMBEDDING: Queue(waiting, waiting)})
    return run_cycle(view, NOW, ADMISSION)


def admitted_and_rejected(plan: Plan) -> tuple[list[str], list[str]]:
    """Ids of the admitted and of the rejected requests."""
    return [name for name, _ in plan.dispatches], sorted(name for name, _ in plan.rejections)


def test_a_late_call_is_rejected_although_memory_is_free():
    assert admitted_and_rejected(decided([(INDEX, 9_000)], [(INDEX, 10_000)])) == (["w0"], [])
    plan = decided([(INDEX, 9_000)], [(INDEX, 12_000)])
    assert admitted_and_rejected(plan) == ([], ["w0"])
    reject = plan.rejections[0][1]
    assert reject.reason is Reason.SLO_UNATTAINABLE
    assert reject.retry_after == seconds(1), "0.9 s, and at least one"


def test_calls_of_one_pass_share_its_constant_time():
    """A pass takes 20 ms and 0.1 ms per token; the deadline is 2 s after arrival."""
    assert admitted_and_rejected(decided([(INDEX, 9_000)], [(INDEX, 10_700)])) == (["w0"], [])
    assert admitted_and_rejected(decided([(INDEX, 9_000)], [(INDEX, 10_900)])) == ([], ["w0"])


def test_the_largest_call_is_rejected_for_a_smaller_one():
    assert admitted_and_rejected(decided([(INDEX, 12_000)], [(INDEX, 9_000)])) == (["w0"], ["h0"])
    # It also gets the memory of the rejected call.
    assert admitted_and_rejected(decided([(INDEX, 12_000)], [(INDEX, 9_000)], memory=10)) == (["w0"], ["h0"])


def test_of_equal_calls_the_last_arrival_is_rejected():
    assert admitted_and_rejected(decided([(INDEX, 12_000)], [(INDEX, 12_000)], held_ago_ms=100)) == (
        [],
        ["w0"],
    )


def test_rejections_are_in_order_of_deadlines():
    plan = decided([], [(INDEX, 9_000 + n) for n in range(9)])
    assert [name for name, _ in plan.rejections] == [f"w{n}" for n in range(2, 9)]


def test_no_call_is_rejected_for_a_lower_class():
    assert admitted_and_rejected(decided([(SEARCH, 12_000)], [(INDEX, 9_000)])) == ([], ["w0"])
    assert admitted_and_rejected(decided([(INDEX, 9_000)], [(SEARCH, 12_000)])) == (["w0"], ["h0"])


def test_non_sheddable_calls_stay():
    assert admitted_and_rejected(decided([(BACKUP, 12_000)], [(INDEX, 9_000)])) == ([], ["w0"])
    assert admitted_and_rejected(decided([(BACKUP, 12_000)], [(BACKUP, 9_000)])) == (["w0"], [])


def test_no_call_is_rejected_for_a_call_that_is_late_anyway():
    assert admitted_and_rejected(decided([(INDEX, 1_000)], [(SEARCH, 30_000)])) == ([], ["w0"])
    assert admitted_and_rejected(decided([(INDEX, 1_000)], [(BACKUP, 30_000)])) == (["w0"], [])


def test_late_calls_in_flight_are_computed_where_they_delay_no_generation():
    assert admitted_and_rejected(decided([(INDEX, 12_000)], [(INDEX, 9_000)], held_ago_ms=1_900)) == (
        ["w0"],
        [],
    )


@pytest.mark.parametrize(
    ("of", "tokens", "ago_ms", "rejected"),
    [
        (INDEX, 12_000, 1_900, ["h0"]),
        (BACKUP, 12_000, 1_900, []),
        (NIGHT, 12_000, 1_900, []),
        # 10 ms of work and a pass of 20 ms under way.
        (INDEX, 100, 2_005, []),
        (INDEX, 100, 2_015, ["h0"]),
    ],
)
def test_late_calls_in_flight_are_rejected_beside_generations(of, tokens, ago_ms, rejected):
    plan = decided([(of, tokens)], [(INDEX, 3_000)], held_ago_ms=ago_ms, is_shared=True)
    assert admitted_and_rejected(plan) == (["w0"], rejected)


@pytest.mark.parametrize(
    ("held", "asked", "ago_s", "admitted"),
    [
        # All are late. The smaller one takes 2.52 s, 20 times of which are 50.4 s.
        ([], [(INDEX, 30_000), (INDEX, 25_000)], 50.3, []),
        ([], [(INDEX, 30_000), (INDEX, 25_000)], 50.5, ["w1"]),
        # A call in flight will end with a pass, and so will one in time.
        ([(INDEX, 30_000)], [(INDEX, 25_000)], 99, []),
        ([], [(INDEX, 1_000), (INDEX, 25_000)], 99, ["w0"]),
        ([], [(INDEX, 30_000), (INDEX, 25_000)], None, []),
    ],
)
def test_beside_generations_one_late_call_is_computed_after_a_long_pause(held, asked, ago_s, admitted):
    plan = decided(held, asked, is_shared=True, last_pass_ago_s=ago_s)
    assert admitted_and_rejected(plan)[0] == admitted


def test_calls_of_other_models_do_not_count():
    assert admitted_and_rejected(decided([(INDEX, 12_000)], [(INDEX, 9_000)], model="other")) == (["w0"], [])


def test_of_the_calls_in_flight_those_of_the_model_with_no_later_deadline_come_before_a_request():
    held = [
        (called("earlier", INDEX, 1, "m", ago_ms=600), 1.0),
        (called("equal", INDEX, 1, "m", ago_ms=500), 10.0),
        (called("later", INDEX, 1, "m", ago_ms=400), 100.0),
        (called("other", INDEX, 1, "other", ago_ms=600), 1_000.0),
        (called("night", NIGHT, 1, "m", ago_ms=600), 10_000.0),
    ]
    leases = MemoryLedger({Owner.EMBEDDING: 1_000}).table(Owner.EMBEDDING)
    share = Share(1_000, 0, 0, 1_000, 9, leases, is_serial=True, calls=tuple(held))
    assert tokens_before(share, called("new", INDEX, 1, "m", ago_ms=500)) == 11.0
    assert tokens_before(share, called("new", NIGHT, 1, "m")) == 10_111.0


def test_calls_without_a_deadline_are_not_rejected():
    assert admitted_and_rejected(decided([(NIGHT, 90_000)], [(INDEX, 9_000)])) == (["w0"], [])


@given(turns, st.integers(0, 10))
def test_remaining_jobs_are_on_time_and_protected_jobs_stay(drawn, begin):
    gone = late_jobs(drawn, begin, 1.0)
    assert gone <= {job.name for job in drawn if job.priority is not None}
    alone = _in_time([job for job in drawn if job.priority is None], begin)
    end = float(begin)
    for job in sorted(drawn):
        if job.name in gone or (job.priority is None and job.name not in alone):
            continue
        end += job.tokens
        assert end <= job.deadline


@given(turns, st.integers(0, 10))
def test_lower_classes_change_nothing_for_higher_ones(drawn, begin):
    gone = late_jobs(drawn, begin, 1.0)
    above = [job for job in drawn if job.priority is None or job.priority > 0]
    assert gone & {job.name for job in above} == late_jobs(above, begin, 1.0)


def _in_time(fixed: list[DeadlineJob], begin: float) -> set[str]:
    kept = set()
    for job in sorted(fixed):
        if begin + job.tokens <= job.deadline:
            begin += job.tokens
            kept.add(job.name)
    return kept
