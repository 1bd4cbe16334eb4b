"""Who may start is found by column as it would be one after the other, and nobody is lost on the way."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.request import Kind, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.core.view import Pace
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.plan_builder import PlanBuilder, Ranking
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.engine.waiting_index import NEVER, WaitingIndex

ANY = ServiceClass("any", Slo(), 0, sheddable=False)
NOW = Instant(50)

Key = tuple[float, int, str]


def newcomer(name: str, random: Random) -> RequestState:
    arrival, prompt, predicted = Instant(random.randrange(9)), random.randint(1, 200), random.randint(1, 40)
    request = Request(name, Kind.GENERATE, "m", "t", ANY, ANY.slo, arrival, prompt, 100)
    one = RequestState(request, predicted, name)
    one.per_block = random.choice([None, None, 32])
    one.is_guess = random.random() < 0.2
    return one


def size_of(one: RequestState) -> Key:
    return (one.memory_time(), one.request.arrival, one.request.id)


def tokens_of(one: RequestState) -> Key:
    return (one.tokens, one.request.arrival, one.request.id)


def drafted(random: Random) -> PlanBuilder:
    """Beside some that run, in a memory that they fill more or less."""
    running = RunningBatch([newcomer(f"run{at}", random) for at in range(random.randrange(4))])
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

    def nobody_ranks(view: EngineView) -> Ranking:
        raise AssertionError("nobody is asked to give way")

    return PlanBuilder(view, nobody_ranks, settle=random.choice([0, 12]))


@given(random=st.randoms(use_true_random=True))
def test_those_are_asked_for_whom_anything_can_be_done(random):
    line, due = WaitingIndex[Key](), {}
    expected: list[tuple[Key, RequestState]] = []
    key_of = size_of
    for step in range(30):
        one = newcomer(f"r{step}", random)
        due[one] = random.choice([None, Instant(10), NOW, Instant(51)])
        line.add(one, key_of(one), one.remaining(), due[one])
        expected.append((key_of(one), one))
        if random.random() < 0.3:
            _, gone = expected.pop(random.randrange(len(expected)))
            line.drop(gone.request.id)
            assert line.find(gone.request.id) is None
        if random.random() < 0.1:
            key_of = tokens_of if key_of is size_of else size_of
            line.resort(key_of)
            expected = [(key_of(one), one) for _, one in expected]
        expected.sort(key=lambda entry: entry[0])
        assert [line[at] for at in range(len(line))] == list(line) == expected
        assert all(line.find(one.request.id) is one for _, one in expected)

        draft, in_vain = drafted(random), random.choice([0, NEVER, random.randint(1, 12)])
        may = []
        for _, one in expected:
            need, since = draft.need(one), due[one]
            fits = need <= draft.free
            is_pressed = since is not None and since <= NOW
            may.append((is_pressed and (fits or need < in_vain)) or (fits and draft.fits_for_horizon(one)))
        assert line.may_start(draft, line.needs(draft.view), line.due <= NOW, in_vain).tolist() == may
        assert line.tokens.tolist() == [one.tokens for _, one in expected]
        assert line.is_guess.tolist() == [one.is_guess for _, one in expected]
        key = key_of(random.choice(expected)[1]) if expected else (0.0, 0, "")
        assert line.place(key) == sum(before < key for before, _ in expected)


def test_who_is_not_in_the_line_cannot_leave_it():
    with pytest.raises(KeyError, match="r1"):
        WaitingIndex[Key]().drop("r1")
