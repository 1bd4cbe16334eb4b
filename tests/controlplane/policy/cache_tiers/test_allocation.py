"""Tier allocation: recorded plans, memory limits, at least half of the optimum."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.cache_tiers.allocation import (
    TierOffers,
    TierPlan,
    hybrid_offers,
    plan_tiers,
)

GREEDY = json.loads((Path(__file__).parents[3] / "golden/scheduling.json").read_text())["greedy"]

requests = st.lists(
    st.tuples(st.integers(0, 400).map(lambda p: p / 100), st.integers(1, 40)), min_size=1, max_size=7
)
ratios = st.sampled_from([0.25, 0.3, 0.5, 0.8, 1.0, 2.0])
penalties = st.sampled_from([0.0, 1e-4, 0.004, 0.02, 0.1])


def offers_of(pairs: Any, **given: Any) -> TierOffers:
    pending, cells = np.array(pairs, dtype=float).T
    return hybrid_offers(pending, cells, **given)


def brute_force(offers: TierOffers, capacity: float) -> float:
    sizes, values = offers.sizes(), offers.values()
    depth, count = sizes.shape
    best = 0.0
    for tiers in itertools.product(range(depth + 1), repeat=count):
        held = [(t - 1, i) for i, t in enumerate(tiers) if t]
        if sum(sizes[at] for at in held) <= capacity:
            best = max(best, sum(values[at] for at in held))
    return best


def check_totals(offers: TierOffers, plan: TierPlan, capacity: float) -> None:
    held = np.flatnonzero(plan.tiers)
    rows = plan.tiers[held] - 1
    assert plan.size <= capacity
    assert plan.size == pytest.approx(offers.sizes()[rows, held].sum())
    assert plan.value == pytest.approx(offers.values()[rows, held].sum())


@pytest.mark.parametrize("case", GREEDY, ids=range(len(GREEDY)))
def test_recorded_plans(case: dict[str, Any]) -> None:
    pairs = list(zip(case["p"], case["m"], strict=True))
    penalty = case["rho"] * case["n_total"]
    plan = plan_tiers(offers_of(pairs, ratio=0.5, cell_penalty=penalty), case["M"])
    assert (plan.tiers > 0).tolist() == [bool(x) for x in case["x"]]
    assert (plan.tiers == 1).tolist() == [bool(y) for y in case["y"]]
    assert plan.value == pytest.approx(case["value"], abs=1e-9)
    assert case["opt"] / 2 - 1e-9 <= plan.value <= case["opt"] + 1e-9
    blocks = plan_tiers(offers_of(pairs, ratio=0.5, cell_penalty=penalty, whole_blocks=True), case["M"])
    assert blocks.value == pytest.approx(case["value_blocks"], abs=1e-9)
    assert case["opt_blocks"] / 2 - 1e-9 <= blocks.value <= case["opt_blocks"] + 1e-9


@given(
    pairs=requests,
    ratio=ratios,
    penalty=penalties,
    capacity=st.integers(0, 120),
    whole_blocks=st.booleans(),
)
def test_plans_fit_and_reach_half_the_optimum(
    *, pairs: Any, ratio: float, penalty: float, capacity: int, whole_blocks: bool
) -> None:
    offers = offers_of(pairs[:6], ratio=ratio, cell_penalty=penalty, whole_blocks=whole_blocks)
    plan = plan_tiers(offers, capacity)
    check_totals(offers, plan, capacity)
    assert 2 * plan.value >= brute_force(offers, capacity) - 1e-9


@given(requests, ratios, st.integers(0, 120), st.randoms(use_true_random=False))
def test_input_order_does_not_matter(pairs: Any, ratio: float, capacity: int, random: Any) -> None:
    # Distinct gains: ties go to the lower index, which a shuffle changes.
    pending, cells = np.array(pairs, dtype=float).T
    pending += np.arange(len(pairs)) / 997
    penalty = 0.003 + np.arange(len(pairs)) / 49999
    plan = plan_tiers(hybrid_offers(pending, cells, ratio=ratio, cell_penalty=penalty), capacity)
    at = random.sample(range(len(pairs)), len(pairs))
    moved = hybrid_offers(pending[at], cells[at], ratio=ratio, cell_penalty=penalty[at])
    again = plan_tiers(moved, capacity)
    assert again.tiers.tolist() == plan.tiers[at].tolist()


def test_equal_gains_go_to_the_lower_index() -> None:
    # Every upgrade gains the same per cell; only one fits in addition to the hidden states.
    offers = offers_of([(3.0, 13), (3.1, 29), (3.2, 20)], ratio=0.5, cell_penalty=0.00453)
    plan = plan_tiers(offers, 31 + 6.5)
    assert plan.tiers.tolist() == [2, 1, 1]


def test_an_upgrade_never_precedes_its_first_step() -> None:
    # At the boundary N*rho*m = (1 - h) p both steps gain the same.
    offers = offers_of([(2.0, 4)], ratio=0.5, cell_penalty=0.25)
    assert plan_tiers(offers, 2.0).tiers.tolist() == [1]
    assert plan_tiers(offers, 4.0).tiers.tolist() == [2]


def test_hidden_states_are_not_used_when_the_penalty_exceeds_the_saving() -> None:
    offers = offers_of([(2.0, 4)], ratio=0.5, cell_penalty=0.26)
    assert plan_tiers(offers, 3.9).tiers.tolist() == [1], "alone it is still worth more than nothing"
    pair = offers_of([(2.0, 4), (9.0, 2)], ratio=0.5, cell_penalty=0.26)
    assert plan_tiers(pair, 5.0).tiers.tolist() == [0, 2]


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_a_tier_that_saves_nothing_is_never_used(ratio: float) -> None:
    offers = offers_of([(2.0, 40), (1.0, 3)], ratio=ratio, cell_penalty=0.0)
    assert plan_tiers(offers, 39.0).tiers.tolist() == [0, 2]


def test_requests_too_large_for_their_cheapest_tier_are_dropped() -> None:
    plan = plan_tiers(offers_of([(5.0, 30), (4.0, 61)], ratio=0.5, cell_penalty=0.001), 30.0)
    assert plan.tiers.tolist() == [2, 0]


def test_a_large_misfit_alone_beats_many_small_gains() -> None:
    plan = plan_tiers(offers_of([(0.5, 1), (40.0, 100)], ratio=0.5, cell_penalty=1.0), 100.0)
    assert plan.tiers.tolist() == [0, 2]
    assert plan.value == 40.0


def test_requests_without_weight_get_only_spare_memory() -> None:
    pairs = [(9.0, 10), (1.0, 10)]
    demoted = replace(offers_of(pairs, ratio=1.0, cell_penalty=0.0), weights=np.array([0.0, 1.0]))
    assert plan_tiers(demoted, 10.0).tiers.tolist() == [0, 2]
    assert plan_tiers(demoted, 20.0).tiers.tolist() == [2, 2], "spare memory is used"
    tail = replace(demoted, weights=np.array([0.4, 1.0]))
    assert plan_tiers(tail, 10.0).tiers.tolist() == [2, 0]


@given(requests, st.integers(0, 120), st.sampled_from([(0.25, 0.5), (0.3, 0.9), (0.5, 0.6)]))
def test_three_tiers_follow_the_hull(pairs: Any, capacity: int, shares: tuple[float, float]) -> None:
    pending, cells = np.array(pairs[:5], dtype=float).T
    count = len(cells)
    offers = TierOffers(
        pending,
        cells,
        shares=np.repeat([[shares[0]], [shares[1]], [1.0]], count, axis=1),
        penalties=np.repeat([[0.02], [0.008], [0.0]], count, axis=1),
        weights=np.ones(count),
    )
    plan = plan_tiers(offers, capacity)
    check_totals(offers, plan, capacity)
    assert 2 * plan.value >= brute_force(offers, capacity) - 1e-9


def test_no_requests() -> None:
    empty = np.zeros(0)
    plan = plan_tiers(hybrid_offers(empty, empty, ratio=0.5, cell_penalty=0.1), 10.0)
    assert (plan.tiers.tolist(), plan.value, plan.size) == ([], 0.0, 0.0)
