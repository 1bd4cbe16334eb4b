"""One scheduling cycle over random views, for every ordering and admission of the registry."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant, milliseconds, seconds
from controlplane.core.deadlines import Progress
from controlplane.core.decision import Admit, Defer, Plan, Reason, Reject
from controlplane.core.memory_ledger import Footprint, MemoryLedger
from controlplane.core.pool_view import Pace, PoolView, Queue, Running, Share, Waiting
from controlplane.core.request import Kind, Owner, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.policy.gate.admission import Admission, AdmissionOptions, predicted_wait, wait_bound
from controlplane.policy.gate.memory_lookahead import LookAhead
from controlplane.policy.gate.ordering import OrderingOptions
from controlplane.policy.gate.scheduling_cycle import run_cycle
from controlplane.policy.registry import ADMISSIONS, ORDERINGS, gate_ordering, lookup

NOW = Instant(seconds(100))
PACE = Pace(step=milliseconds(20), per_prompt_token=milliseconds(0.1))
OPTIONS = AdmissionOptions(max_waiting=4, max_wait=seconds(30), defer_threshold=milliseconds(50))
CLASSES = [
    ServiceClass("batch", Slo(), priority=0, sheddable=False),
    ServiceClass("chat", Slo(ttft=seconds(2)), priority=1, sheddable=True),
    ServiceClass("urgent", Slo(ttft=seconds(0.5), e2e=seconds(9)), priority=2, sheddable=True),
]
EVERY_POLICY = list(product(sorted(ORDERINGS), sorted(ADMISSIONS)))

footprints = st.builds(
    Footprint,
    base=st.integers(1, 300),
    per_step=st.integers(0, 5),
    steps=st.integers(1, 60),
    worst=st.integers(0, 700),
)
wishes = st.fixed_dictionaries(
    {
        "ago_ms": st.integers(0, 40_000),
        "at": st.integers(0, len(CLASSES) - 1),
        "footprint": footprints,
        "accepted": st.booleans(),
        "undecided": st.booleans(),
    }
)
loads = st.lists(footprints, max_size=8)
queues = st.lists(wishes, min_size=1, max_size=8)


def admission(name: str = "look-ahead") -> Admission:
    return Admission(OPTIONS, lookup("admission", ADMISSIONS, name))


def waiting_of(wish: dict[str, Any], index: int, ordering: str) -> Waiting:
    service_class = CLASSES[wish["at"]]
    request = Request(
        id=f"w{index}",
        kind=Kind.GENERATE,
        model="m",
        tenant="t",
        service_class=service_class,
        slo=service_class.slo,
        arrival=Instant(NOW - milliseconds(wish["ago_ms"])),
        prompt_tokens=50,
        max_output_tokens=100,
    )
    footprint = wish["footprint"]
    until = None if wish["accepted"] else wait_bound(request, footprint, PACE, OPTIONS)
    policy = gate_ordering(ordering, OrderingOptions(seconds(1), seconds(10)))
    return Waiting(request, footprint, until, policy.rank(request, footprint, PACE), footprint.area)


def share_of(load: list[Footprint], *, preemptible: bool = True, slots: int = 10) -> Share:
    ledger = MemoryLedger({Owner.LLM: 1_000, Owner.EMBEDDING: 0})
    running = []
    for i, footprint in enumerate(load):
        if ledger.demanded(Owner.LLM) + footprint.base > 1_000:
            break
        ledger.open(f"r{i}", Owner.LLM, footprint, priority=i % 2)
        running.append(
            Running(
                f"r{i}", i % 2, footprint.base, seconds(1), seconds(0.1), footprint.steps, 0, Progress(NOW)
            )
        )
    return Share(
        ceiling=1_000,
        held=ledger.held(Owner.LLM),
        deficit=0,
        largest=1_000,
        free_slots=slots - len(running),
        leases=ledger.table(Owner.LLM),
        pace=PACE,
        preemptible=lambda: tuple(running) if preemptible else (),
    )


def view_of(share: Share, wishes: list[dict[str, Any]], ordering: str = "edf") -> PoolView:
    entries = [waiting_of(wish, i, ordering) for i, wish in enumerate(wishes)]
    undecided = [
        entry
        for entry, wish in zip(entries, wishes, strict=True)
        if wish["undecided"] or (entry.until is not None and entry.until <= NOW)
    ]
    queue = Queue(sorted(entries, key=lambda w: w.rank), undecided)
    return PoolView({Owner.LLM: share}, {Owner.LLM: queue})


def verdicts(plan: Plan) -> dict[str, Any]:
    every = [*plan.dispatches, *plan.deferrals, *plan.rejections]
    assert len({name for name, _ in every}) == len(every), "one decision per request"
    return dict(every)


@pytest.mark.parametrize(("ordering", "policy"), EVERY_POLICY)
@given(load=loads, wishes=queues)
@settings(max_examples=25, deadline=None)
def test_every_policy_conforms(
    ordering: str, policy: str, load: list[Footprint], wishes: list[dict[str, Any]]
) -> None:
    share = share_of(load)
    view = view_of(share, wishes, ordering)
    plan = run_cycle(view, NOW, admission(policy))
    decided = verdicts(plan)
    queue = view.queues[Owner.LLM]
    assert {w.request.id for w in queue.undecided} <= set(decided), "every undecided request is decided"
    by_id = {w.request.id: w for w in queue.waiting}
    assert set(decided) <= set(by_id)

    stands_back = partial(admission(policy).yields_to_timely, share, now=NOW)
    ranks = [(stands_back(by_id[name]), by_id[name].rank) for name, _ in plan.dispatches]
    assert ranks == sorted(ranks), "dispatches go by rank, late requests last"
    priorities = dict(zip(share.leases.ids, share.leases.priority, strict=True))
    held, victims = share.held, set()
    for name, admit in plan.dispatches:
        for victim in admit.victims:
            assert victim.request_id not in victims, "each victim is preempted once"
            assert priorities[victim.request_id] < by_id[name].request.service_class.priority
            victims.add(victim.request_id)
            held -= victim.freed_bytes
        held += by_id[name].footprint.base
        assert held <= share.ceiling
    assert len(plan.dispatches) <= share.free_slots + len(victims)

    for name, defer in plan.deferrals:
        waiting = by_id[name]
        assert defer.until == waiting.until
        assert defer.until is None or defer.until > NOW, "a request whose wait has ended is not deferred"
    for _, reject in plan.rejections:
        assert (reject.retry_after is None) == (reject.reason is Reason.NEVER_FITS)


@given(loads, queues, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_input_order_does_not_matter(
    load: list[Footprint], wishes: list[dict[str, Any]], random: Any
) -> None:
    share = share_of(load)
    view = view_of(share, wishes)
    queue = view.queues[Owner.LLM]
    shuffled = random.sample(list(queue.undecided), len(queue.undecided))
    candidates = random.sample(share.preemptible(), len(share.preemptible()))
    moved = PoolView(
        {Owner.LLM: replace(share, preemptible=lambda: tuple(candidates))},
        {Owner.LLM: Queue(queue.waiting, shuffled)},
    )
    assert run_cycle(moved, NOW, admission()) == run_cycle(view, NOW, admission())


def admissions_lost(
    load: list[Footprint], wishes: list[dict[str, Any]], gone: int
) -> tuple[list[str], dict[str, Any]]:
    """Requests admitted beside `load` but not without its lease `gone`, and all decisions without it."""
    full = share_of(load, preemptible=False)
    more = run_cycle(view_of(full, wishes), NOW, admission())
    less = verdicts(
        run_cycle(view_of(full.without(full.leases.ids[gone : gone + 1]), wishes), NOW, admission())
    )
    return [name for name, _ in more.dispatches if not isinstance(less.get(name), Admit)], less


@given(loads, st.lists(wishes.map(lambda wish: {**wish, "at": 0}), min_size=1, max_size=8), st.integers(0, 7))
@settings(deadline=None)
def test_less_load_loses_no_admission_of_requests_without_deadline(
    load: list[Footprint], wishes: list[dict[str, Any]], gone: int
) -> None:
    assert admissions_lost(load, wishes, gone)[0] == []


@given(loads, queues, st.integers(0, 7))
@settings(deadline=None)
def test_less_load_never_turns_admission_into_rejection(
    load: list[Footprint], wishes: list[dict[str, Any]], gone: int
) -> None:
    lost, less = admissions_lost(load, wishes, gone)
    # Those behind the first one wait for it, so only the first one decides by its own prospects.
    assert not any(isinstance(less.get(name), Reject) for name in lost[:1])


def test_a_request_squeezed_in_under_more_load_waits_for_room_that_comes_in_time() -> None:
    load = [Footprint(100, 5, 60), Footprint(300, 5, 60), Footprint(300, 2, 40)]
    wish = {
        "footprint": Footprint(50, 5, 30), "at": 1, "ago_ms": 1_000, "accepted": False, "undecided": True,
    }  # fmt: skip
    lost, less = admissions_lost(load, [wish], 0)
    assert lost == ["w0"]
    assert less["w0"].reason is Reason.NO_MEMORY
    assert admissions_lost(load, [{**wish, "undecided": False}], 0) == (["w0"], {})


@given(loads, queues)
@settings(deadline=None)
def test_every_deferral_ends_within_its_bound(load: list[Footprint], wishes: list[dict[str, Any]]) -> None:
    view = view_of(share_of(load, slots=0), wishes)
    plan = run_cycle(view, NOW, admission())
    by_id = {w.request.id: w for w in view.queues[Owner.LLM].waiting}
    for name, defer in plan.deferrals:
        if defer.until is None:
            continue
        waiting = by_id[name]
        assert defer.until <= waiting.request.arrival + OPTIONS.max_wait
        alone = PoolView(view.shares, {Owner.LLM: Queue([waiting], [waiting])})
        final = run_cycle(alone, defer.until, admission())
        assert [rejected for rejected, _ in final.rejections] == [name]


def test_a_request_above_a_lowered_quota_is_deferred_even_if_nothing_runs() -> None:
    wish = {"ago_ms": 0, "at": 0, "footprint": Footprint(300), "accepted": False, "undecided": True}
    lowered = replace(share_of([]), ceiling=200, largest=1_000)
    plan = run_cycle(view_of(lowered, [wish]), NOW, admission())
    assert [name for name, _ in plan.deferrals] == ["w0"]


def test_only_new_requests_are_rejected_for_a_full_queue() -> None:
    new_request = {"footprint": Footprint(10), "at": 0, "ago_ms": 1_000, "accepted": False, "undecided": True}
    preempted = {**new_request, "ago_ms": 0, "accepted": True}
    plan = run_cycle(view_of(share_of([], slots=0), [new_request] * 5 + [preempted]), NOW, admission())
    assert [(name, reject.reason) for name, reject in plan.rejections] == [("w4", Reason.QUEUE_FULL)]
    assert dict(plan.deferrals)["w5"] == Defer(None, Reason.BEHIND_OTHERS)


def test_what_never_fits_is_rejected_with_the_numbers() -> None:
    footprint = Footprint(10, worst=1_500)
    wish = {"ago_ms": 0, "at": 0, "footprint": footprint, "accepted": False, "undecided": True}
    ((_, reject),) = run_cycle(view_of(share_of([]), [wish]), NOW, admission()).rejections
    assert reject.reason is Reason.NEVER_FITS
    assert "1,500" in reject.detail and "1,000" in reject.detail


def test_only_a_request_that_waiting_makes_late_preempts_lower_classes() -> None:
    running = share_of([Footprint(400, 0, 60), Footprint(550, 0, 60)])
    wish = {"ago_ms": 400, "at": 2, "footprint": Footprint(300), "accepted": False, "undecided": True}
    ((name, admit),) = run_cycle(view_of(running, [wish]), NOW, admission()).dispatches
    assert (name, [v.request_id for v in admit.victims]) == ("w0", ["r0"])
    patient, late = {**wish, "at": 0}, {**wish, "ago_ms": 600, "accepted": True}
    for other in (patient, late):
        assert run_cycle(view_of(running, [other]), NOW, admission()).dispatches == ()


@pytest.mark.parametrize(
    ("at", "ago_ms", "steps", "starts"),
    [(2, 100, 60, True), (2, 100, 10, False), (0, 100, 60, False), (2, 600, 60, False)],
    ids=["late if it waits", "memory is freed in time", "no objective", "late already"],
)
def test_a_request_late_by_waiting_for_predicted_room_takes_present_room(at, ago_ms, steps, starts):
    # 600 of 1,000 are held and grow by 240 to 300 within `steps` of 20 ms; the TTFT is 0.5 s.
    running = share_of([Footprint(300, 150 // steps, steps)] * 2)
    new_request = Footprint(200, steps=60)
    wish = {"ago_ms": ago_ms, "at": at, "footprint": new_request, "accepted": True, "undecided": True}
    plan = run_cycle(view_of(running, [wish]), NOW, admission())
    assert [(name, admit.victims) for name, admit in plan.dispatches] == ([("w0", ())] if starts else [])


def test_victims_cover_present_use_only() -> None:
    # The predicted growth of the others, 600, would require the second victim as well.
    running = share_of([Footprint(400, 10, 30), Footprint(150), Footprint(400, 10, 30)])
    wish = {"ago_ms": 400, "at": 2, "footprint": Footprint(300), "accepted": False, "undecided": True}
    ((_, admit),) = run_cycle(view_of(running, [wish]), NOW, admission()).dispatches
    assert [victim.freed_bytes for victim in admit.victims] == [400]


def test_unknown_names_list_the_valid_ones() -> None:
    options = OrderingOptions(seconds(1), seconds(10))
    with pytest.raises(ValueError, match=r"scheduling\.ordering='lifo'.*edf, fcfs, least-slack"):
        gate_ordering("lifo", options)
    with pytest.raises(ValueError, match=r"'srmt': it orders an engine's steps.*choose one of edf, fcfs"):
        gate_ordering("srmt", options)


def test_the_wait_bound_is_earlier_if_waiting_longer_is_pointless() -> None:
    request = waiting_of(
        {"ago_ms": 0, "at": 1, "footprint": Footprint(10), "accepted": True}, 0, "fcfs"
    ).request
    bound = wait_bound(request, Footprint(10), PACE, OPTIONS)
    assert bound == request.arrival + seconds(2) - milliseconds(5) - milliseconds(20)
    patient = replace(request, service_class=CLASSES[0], slo=Slo())
    assert wait_bound(patient, Footprint(10), PACE, OPTIONS) == Duration(request.arrival + seconds(30))


@pytest.mark.parametrize("computed", [0, 600])
def test_a_serial_owner_frees_memory_as_it_works(computed: int):
    ledger = MemoryLedger({Owner.EMBEDDING: 1_000})
    for name in "abcd":
        ledger.open(name, Owner.EMBEDDING, Footprint(250, steps=1_000), priority=0)
    wish = {"ago_ms": 0, "at": 0, "accepted": False, "undecided": True, "footprint": Footprint(250)}
    held = waiting_of(wish, 1, "edf").request
    share = Share(
        ceiling=1_000, held=1_000, deficit=0, largest=1_000, free_slots=9,
        leases=ledger.table(Owner.EMBEDDING), pace=PACE, is_serial=True,
        calls=tuple((replace(held, id=name), 1_000 - computed) for name in "abcd"),
    )  # fmt: skip

    def wait_ms(base: int, *, ahead: float = 0.0) -> float:
        request = replace(held, slo=Slo(ttft=milliseconds(1)))
        waiting = replace(waiting_of(wish, 0, "edf"), request=request, footprint=Footprint(base))
        return predicted_wait(share, LookAhead(share.leases), waiting, ahead=ahead) / 1e6

    # Calls of 0.1 ms a token hold the pool: a quarter is free after a quarter of what is not computed yet.
    left = (1_000 - computed) / 1_000
    assert [wait_ms(base) for base in (250, 500, 1_000)] == [100 * left, 200 * left, 400 * left]
    assert wait_ms(250, ahead=2_000) == 100 * left + 200


def test_requests_that_can_be_on_time_go_before_late_ones():
    """The class "urgent" is late half a second after its arrival."""
    share = share_of([Footprint(10, steps=5)], slots=2)
    wish = {"footprint": Footprint(10, steps=5), "accepted": False, "undecided": True}

    def started(late_ms: int, *, accepted: bool = False, slots: int = 1) -> list[str]:
        late = {**wish, "at": 2, "ago_ms": late_ms, "accepted": accepted}
        view = view_of(replace(share, free_slots=slots), [late, {**wish, "at": 0, "ago_ms": 0}])
        return [name for name, _ in run_cycle(view, NOW, admission()).dispatches]

    assert started(400) == ["w0"]
    assert started(600) == started(29_900) == ["w1"]
    assert started(600, slots=2) == ["w1", "w0"]
    # A request admitted before resumes at its rank.
    assert started(600, accepted=True) == ["w0"]


def test_a_late_request_that_yields_blocks_no_other():
    """A new request is rejected for the work before it, not for late work that it passes."""
    pool = share_of([Footprint(900, steps=2)])
    late = {
        "footprint": Footprint(900, per_step=0, steps=400),
        "accepted": False,
        "undecided": False,
        "ago_ms": 20_000,
    }
    new_request = {
        "footprint": Footprint(300, steps=5),
        "accepted": False,
        "undecided": True,
        "at": 2,
        "ago_ms": 0,
    }
    for at, waits in ((2, True), (0, False)):
        view = view_of(pool, [{**late, "at": at}, new_request])
        assert ("w1" in dict(run_cycle(view, NOW, admission()).deferrals)) is waits
