"""The columnar index of waiting requests against a request-by-request test."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.plan_builder import PlanBuilder, Ranking
from controlplane.policy.engine.request_state import RequestState, memory_time
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.engine.waiting_index import NEVER, WaitingIndex
from tests.example_requests import a_request

NOW = Instant(50)

Key = tuple[float, int, str]


def random_state(name: str, random: Random) -> RequestState:
    arrival, prompt, predicted = Instant(random.randrange(9)), random.randint(1, 200), random.randint(1, 40)
    one = RequestState(a_request(name, prompt, 100, arrival=arrival), predicted)
    one.block_tokens = random.choice([None, None, 32])
    one.is_guess = random.random() < 0.2
    return one


def size_of(one: RequestState) -> Key:
    return (memory_time(one.tokens, one.remaining()), one.request.arrival, one.request.id)


def tokens_of(one: RequestState) -> Key:
    return (one.tokens, one.request.arrival, one.request.id)


def random_builder(random: Random) -> PlanBuilder:
    """A plan builder with up to three running requests."""
    running = RunningBatch([random_state(f"run{at}", random) for at in range(random.randrange(4))])
    running.held[:] = running.tokens // 16 + 1
    view = EngineView(
        now=NOW,
        pace=Pace(Duration(0), Duration(0)),
        block_tokens=16,
        quota=60,
        used=int(running.held.sum()),
        growth=random.randrange(4),
        free_slots=9,
        running=running,
    )

    def no_ranking(view: EngineView) -> Ranking:
        raise AssertionError("no preemption is needed")

    return PlanBuilder(view, no_ranking, settle=random.choice([0, 12]))


@given(random=st.randoms(use_true_random=True))
def test_may_start_equals_a_test_of_each_request(random):
    index, due = WaitingIndex[Key](), {}
    expected: list[tuple[Key, RequestState]] = []
    key_of = size_of
    for step in range(30):
        one = random_state(f"r{step}", random)
        due[one] = random.choice([None, Instant(10), NOW, Instant(51)])
        index.add(one, key_of(one), one.remaining(), due[one])
        expected.append((key_of(one), one))
        if random.random() < 0.3:
            _, gone = expected.pop(random.randrange(len(expected)))
            index.drop(gone.request.id)
            assert index.find(gone.request.id) is None
        if random.random() < 0.1:
            key_of = tokens_of if key_of is size_of else size_of
            index.resort(key_of)
            expected = [(key_of(one), one) for _, one in expected]
        expected.sort(key=lambda entry: entry[0])
        assert [index[at] for at in range(len(index))] == list(index) == expected
        assert all(index.find(one.request.id) is one for _, one in expected)

        builder, unobtainable = random_builder(random), random.choice([0, NEVER, random.randint(1, 12)])
        may = []
        for _, one in expected:
            need, since = builder.view.need(one), due[one]
            fits = need <= builder.free
            is_pressed = since is not None and since <= NOW
            may.append(
                (is_pressed and (fits or need < unobtainable)) or (fits and builder.fits_for_horizon(one))
            )
        assert (
            index.may_start(builder, index.needs(builder.view), index.due <= NOW, unobtainable).tolist()
            == may
        )
        assert index.tokens.tolist() == [one.tokens for _, one in expected]
        assert index.is_guess.tolist() == [one.is_guess for _, one in expected]
        key = key_of(random.choice(expected)[1]) if expected else (0.0, 0, "")
        assert index.place(key) == sum(before < key for before, _ in expected)


def test_dropping_an_unknown_request_raises():
    with pytest.raises(KeyError, match="r1"):
        WaitingIndex[Key]().drop("r1")


def test_sorting_again_takes_no_more_memory():
    """An engine sorts its waiting requests again whenever the price of a prefill changes clearly."""
    index = WaitingIndex[Key]()
    for at in range(100):
        one = random_state(str(at), Random(at))
        index.add(one, size_of(one), one.remaining(), None)
    for key_of in [tokens_of, size_of] * 25:
        index.resort(key_of)
    assert index.tokens.base is not None and index.tokens.base.shape[1] < 256
