"""The account of those that have lost their promise: their share of all block-steps, no less and no more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.clock import Duration, Instant
from controlplane.core.view import Pace
from controlplane.policy.aged_share import AgedShare
from controlplane.policy.engine_step import EngineView

QUOTA = 100
VIEW = EngineView(Instant(0), Pace(Duration(0), Duration(0)), 16, QUOTA, 0, 0, 64, [], {})


def served(share: float, stays: list[tuple[int, int]], steps: int) -> tuple[int, int]:
    """(block-steps of the aged, starts) when the next one of (blocks, steps) starts whenever it may."""
    account, used, starts = AgedShare(share), 0, 0
    left: dict[str, tuple[int, int]] = {}
    for _ in range(steps):
        held = {one: blocks for one, (blocks, _) in left.items()}
        used += sum(held.values())
        account.account(replace(VIEW, held=held))
        left = {one: (blocks, stay - 1) for one, (blocks, stay) in left.items() if stay > 1}
        if account.has_credit:
            name = f"aged{starts}"
            left[name] = stays[starts % len(stays)]
            account.running.add(name)
            starts += 1
    return used, starts


@given(
    share=st.sampled_from([0.02, 0.1, 0.3]),
    stays=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=5),
)
def test_while_somebody_waits_the_aged_get_their_share_but_for_one_stay(share, stays):
    steps = 2_000
    used, starts = served(share, stays, steps)
    largest = max(blocks * stay for blocks, stay in stays)
    # What is earned in a step that ends a debt is not saved up; and several may overlap in a large share.
    assert used >= share * QUOTA * (steps - starts) - largest
    assert used <= share * QUOTA * steps + largest + max(blocks for blocks, _ in stays) * 60


def test_nothing_is_saved_up_while_nobody_is_served():
    account = AgedShare(0.5)
    for _ in range(1_000):
        account.account(VIEW)
    account.running.add("one")
    account.account(replace(VIEW, held={"one": 60}))
    assert not account.has_credit
    account.account(VIEW)
    assert account.has_credit


@pytest.mark.parametrize("share", [0.0])
def test_without_a_share_nobody_ever_starts(share):
    assert served(share, [(1, 1)], 100) == (0, 0)
