"""Account of lost requests past their patience: they get their share of block-steps, no more and no less."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.pool_view import Pace
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.engine.running_batch import RunningBatch
from controlplane.policy.engine.srmt import AgedShare
from tests.example_requests import a_request

QUOTA = 100
VIEW = EngineView(Instant(0), Pace(Duration(0), Duration(0)), 16, QUOTA, 0, 0, 64, RunningBatch())
ANY = a_request("any")


def holding(blocks: int) -> RequestState:
    one = RequestState(ANY, predicted=1)
    one.held = blocks
    return one


def served(share: float, stays: list[tuple[int, int]], steps: int) -> tuple[int, int]:
    """Block-steps and starts of aged requests; the next (blocks, steps) starts as soon as allowed."""
    account, used, starts = AgedShare(share), 0, 0
    left: dict[RequestState, int] = {}
    for _ in range(steps):
        used += sum(one.held for one in left)
        account.account(replace(VIEW, running=RunningBatch(left)))
        left = {one: stay - 1 for one, stay in left.items() if stay > 1}
        if account.has_credit:
            blocks, stay = stays[starts % len(stays)]
            newest = holding(blocks)
            left[newest] = stay
            account.running.add(newest)
            starts += 1
    return used, starts


@pytest.mark.long
@given(
    share=st.sampled_from([0.02, 0.1, 0.3]),
    stays=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=5),
)
def test_aged_requests_get_their_share_within_one_residence(share, stays):
    steps = 2_000
    used, starts = served(share, stays, steps)
    largest = max(blocks * stay for blocks, stay in stays)
    # Surplus of the step that repays a debt is not saved; several requests may overlap in a large share.
    assert used >= share * QUOTA * (steps - starts) - largest
    assert used <= share * QUOTA * steps + largest + max(blocks for blocks, _ in stays) * 60


def test_no_credit_accumulates_while_no_request_is_served():
    account = AgedShare(0.5)
    for _ in range(1_000):
        account.account(VIEW)
    one = holding(60)
    account.running.add(one)
    account.account(replace(VIEW, running=RunningBatch([one])))
    assert not account.has_credit
    account.account(VIEW)
    assert account.has_credit


@pytest.mark.parametrize("share", [0.0])
def test_without_a_share_no_aged_request_starts(share):
    assert served(share, [(1, 1)], 100) == (0, 0)
