"""Calls that are computed in turn: who gives way, and what the gate tells them."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Instant, after, milliseconds, seconds
from controlplane.core.decision import Plan, Reason
from controlplane.core.memory import Footprint, MemoryLedger, Quota
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace, PoolView, Queue, Share, Waiting
from controlplane.policy.gate.admission import Admission, AdmissionOptions
from controlplane.policy.gate.cycle import run_cycle
from controlplane.policy.gate.moore_hodgson import DeadlineJob, late_jobs
from controlplane.policy.gate.preemption import PreemptionOptions
from controlplane.policy.registry import ADMISSIONS, lookup

NOW = Instant(seconds(100))
PACE = Pace(step=milliseconds(20), per_prompt_token=milliseconds(0.1))
ADMISSION = Admission(
    AdmissionOptions(
        overflow_probability=0.05, max_waiting=9, max_wait=seconds(30), defer_threshold=milliseconds(50)
    ),
    PreemptionOptions(tau=seconds(1), almost_done_steps=2, thrash_penalty=1.0),
    lookup("admission", ADMISSIONS, "look-ahead"),
)
INDEX = ServiceClass("index", Slo(e2e=seconds(2)), priority=0, sheddable=True)
SEARCH = ServiceClass("search", Slo(e2e=seconds(2)), priority=1, sheddable=True)
BACKUP = ServiceClass("backup", Slo(e2e=seconds(2)), priority=0, sheddable=False)
NIGHT = ServiceClass("night", Slo(), priority=0, sheddable=True)

Call = tuple[ServiceClass, int]
"""A class, and 1,000 tokens for each tenth of a second; 2 s are promised."""

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
    held: list[Call], asked: list[Call], *, model: str = "m", held_ago_ms: float = 0, memory: int = 1_000
) -> Plan:
    """ "h0" and so on are held by an embedder, "w0" and so on ask for it."""
    ledger = MemoryLedger({Owner.EMBEDDING: Quota(1_000)})
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
    )  # fmt: skip
    view = PoolView({Owner.EMBEDDING: share}, {Owner.EMBEDDING: Queue(waiting, waiting)})
    return run_cycle(view, NOW, ADMISSION)


def told(plan: Plan) -> tuple[list[str], list[str]]:
    """Who is let in, and who is turned away."""
    return [name for name, _ in plan.dispatches], sorted(name for name, _ in plan.rejections)


def test_room_is_not_time():
    assert told(decided([(INDEX, 9_000)], [(INDEX, 10_000)])) == (["w0"], [])
    plan = decided([(INDEX, 9_000)], [(INDEX, 12_000)])
    assert told(plan) == ([], ["w0"])
    reject = plan.rejections[0][1]
    assert reject.reason is Reason.SLO_UNATTAINABLE
    assert reject.retry_after == seconds(1), "0.9 s, and at least one"


def test_a_smaller_call_takes_the_time_of_a_larger_one():
    assert told(decided([(INDEX, 12_000)], [(INDEX, 9_000)])) == (["w0"], ["h0"])
    # And its memory.
    assert told(decided([(INDEX, 12_000)], [(INDEX, 9_000)], memory=10)) == (["w0"], ["h0"])


def test_of_calls_alike_the_one_that_came_last_gives_way():
    assert told(decided([(INDEX, 12_000)], [(INDEX, 12_000)], held_ago_ms=100)) == ([], ["w0"])


def test_those_who_give_way_are_told_in_the_order_of_their_deadlines():
    plan = decided([], [(INDEX, 9_000 + n) for n in range(9)])
    assert [name for name, _ in plan.rejections] == [f"w{n}" for n in range(2, 9)]


def test_nobody_gives_way_for_a_lower_class():
    assert told(decided([(SEARCH, 12_000)], [(INDEX, 9_000)])) == ([], ["w0"])
    assert told(decided([(INDEX, 9_000)], [(SEARCH, 12_000)])) == (["w0"], ["h0"])


def test_who_may_not_be_turned_away_stays():
    assert told(decided([(BACKUP, 12_000)], [(INDEX, 9_000)])) == ([], ["w0"])
    assert told(decided([(BACKUP, 12_000)], [(BACKUP, 9_000)])) == (["w0"], [])


def test_nobody_gives_way_for_who_is_late_all_the_same():
    assert told(decided([(INDEX, 1_000)], [(SEARCH, 30_000)])) == ([], ["w0"])
    assert told(decided([(INDEX, 1_000)], [(BACKUP, 30_000)])) == (["w0"], [])


def test_who_is_late_inside_is_not_sent_away():
    assert told(decided([(INDEX, 12_000)], [(INDEX, 9_000)], held_ago_ms=1_900)) == (["w0"], [])


def test_another_models_calls_take_no_time_of_it():
    assert told(decided([(INDEX, 12_000)], [(INDEX, 9_000)], model="other")) == (["w0"], [])


def test_who_was_promised_nothing_gives_no_way():
    assert told(decided([(NIGHT, 90_000)], [(INDEX, 9_000)])) == (["w0"], [])


@given(turns, st.integers(0, 10))
def test_all_that_stay_are_in_time_and_who_may_not_go_stays(drawn, begin):
    gone = late_jobs(drawn, begin, 1.0)
    assert gone <= {turn.name for turn in drawn if turn.standing is not None}
    alone = _in_time([turn for turn in drawn if turn.standing is None], begin)
    end = float(begin)
    for turn in sorted(drawn):
        if turn.name in gone or (turn.standing is None and turn.name not in alone):
            continue
        end += turn.tokens
        assert end <= turn.deadline


@given(turns, st.integers(0, 10))
def test_lower_classes_change_nothing_for_higher_ones(drawn, begin):
    gone = late_jobs(drawn, begin, 1.0)
    above = [turn for turn in drawn if turn.standing is None or turn.standing > 0]
    assert gone & {turn.name for turn in above} == late_jobs(above, begin, 1.0)


def _in_time(fixed: list[DeadlineJob], begin: float) -> set[str]:
    kept = set()
    for turn in sorted(fixed):
        if begin + turn.tokens <= turn.deadline:
            begin += turn.tokens
            kept.add(turn.name)
    return kept
